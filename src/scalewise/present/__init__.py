"""Run folders in, one self-contained page out; or the same page, live."""
