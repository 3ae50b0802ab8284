"""A result becomes one story, drawn in a terminal or on a page; and what is drawn while it is on its way.

- `story`: what a story is made of; `stories/<kind>` make one from the JSON document that a run stores.
- `terminal`: draws any story with rich. `page`: draws stories as one self-contained HTML file.
- `words`: numbers, shares, durations, bytes, prices and intervals in words: one definition of each.
- `live`, `live_compare`: bars, epoch lines and tables while something runs. `server`: the pages, live.
- `stored`: run folders and their JSON, which anyone may have written.
- `charts`: figures as SVG.

It may import everything below: `watch`, `runs`, `plan`, `doctor`, `engine`, `stats`, `recipe`, `records`. No torch.
"""
