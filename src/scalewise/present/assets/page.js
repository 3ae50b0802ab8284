// What a page does besides being read: numbers under the pointer or the arrow keys, and following a run that goes on.
(() => {
  const SVG = "http://www.w3.org/2000/svg";

  const scale = (numbers) => {
    const [low, high, start, end, log] = numbers, from = log ? Math.log10(low) : low, to = log ? Math.log10(high) : high;
    return (place) => { const value = from + (to - from) * (place - start) / (end - start); return log ? 10 ** value : value; };
  };
  const shown = (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4))));

  // The nearest point of every line to a place on the x axis.
  const nearest = (drawing, place) => [...drawing.querySelectorAll("g[data-name]")].flatMap((group) => {
    const line = group.querySelector("polyline.line");
    if (!line) return [];
    const points = line.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number));
    const best = points.reduce((found, point) => (Math.abs(point[0] - place) < Math.abs(found[0] - place) ? point : found));
    return [{ name: group.dataset.name, at: best }];
  });

  const readable = (drawing) => {
    const numbers = drawing.dataset.scales.split(" ").map(Number);
    if (!drawing.querySelector("polyline.line")) { drawing.removeAttribute("tabindex"); return; }
    const across = scale(numbers.slice(0, 5)), up = scale(numbers.slice(5)), [, , start, end] = numbers;
    const line = document.createElement("p");
    line.className = "readout";
    line.setAttribute("aria-live", "polite");
    drawing.after(line);
    const cursor = document.createElementNS(SVG, "path");
    cursor.setAttribute("class", "cursor");
    drawing.append(cursor);
    let place = start;
    const tell = (wanted) => {
      place = Math.min(end, Math.max(start, wanted));
      const found = nearest(drawing, place);
      cursor.setAttribute("d", `M${place} 26V${drawing.viewBox.baseVal.height - 42}`);
      line.textContent = `${shown(across(found[0].at[0]))}: ${found.map((one) => `${one.name} ${shown(up(one.at[1]))}`).join(", ")}`;
    };
    const clear = () => { cursor.removeAttribute("d"); line.textContent = ""; };
    drawing.addEventListener("pointermove", (event) => {
      const box = drawing.getBoundingClientRect();
      tell((event.clientX - box.left) * drawing.viewBox.baseVal.width / box.width);
    });
    drawing.addEventListener("pointerleave", clear);
    drawing.addEventListener("blur", clear);
    drawing.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: place - 8, ArrowRight: place + 8, Home: start, End: end };
      if (!(event.key in moves)) return;
      event.preventDefault();
      tell(moves[event.key]);
    });
  };

  const start = (root) => {
    root.querySelectorAll("svg[data-scales]").forEach(readable);
    planner.start(root);
  };

  // What a person has opened or chosen stays so when a page is replaced by a newer one.
  const remembered = () => ({
    open: [...document.querySelectorAll("main details")].map((one) => one.open),
    chosen: [...document.querySelectorAll("main input")].map((one) => [one.checked, one.value]),
  });
  const restore = ({ open, chosen }) => {
    document.querySelectorAll("main details").forEach((one, order) => { if (order in open) one.open = open[order]; });
    document.querySelectorAll("main input").forEach((one, order) => {
      if (!(order in chosen)) return;
      if (one.type === "range") { one.value = chosen[order][1]; one.dispatchEvent(new Event("input")); } else one.checked = chosen[order][0];
    });
  };

  const follow = (address) => {
    const state = document.getElementById("state");
    let asking = false, again = false;
    const refresh = async () => {
      if (asking) { again = true; return; }
      asking = true;
      try {
        const answer = await fetch(location.href, { cache: "no-store" });
        if (!answer.ok) throw new Error(String(answer.status));
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const kept = remembered();
        document.querySelector("main").replaceChildren(...page.querySelector("main").childNodes);
        start(document.querySelector("main"));
        restore(kept);
        state.textContent = `live, ${new Date().toLocaleTimeString()}`;
      } catch { state.textContent = "the server does not answer"; }
      asking = false;
      if (again) { again = false; refresh(); }
    };
    const events = new EventSource(address);
    let first = true;
    events.addEventListener("message", () => { if (!first) refresh(); first = false; state.textContent ||= "live"; });
    events.addEventListener("error", () => { state.textContent = "the server does not answer"; });
  };

  start(document);
  if (document.body.dataset.live) follow(document.body.dataset.live);
})();
