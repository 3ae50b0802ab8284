// Sliders over the planning model: every number and line on show is computed anew when one is moved.
const planner = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 460, HEIGHT = 290, LEFT = 56, RIGHT = 12, TOP = 26, BOTTOM = 42;

  const element = (name, attributes = {}, text = "", space = null) => {
    const made = space ? document.createElementNS(space, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  };
  const shape = (name, attributes, text = "") => element(name, attributes, text, SVG);

  const digits = (value, most) => Number(value.toPrecision(most)).toLocaleString("en", { maximumSignificantDigits: most });
  const number = (value) => (value === null || value === undefined ? "–"
    : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en")
    : value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : digits(value, 4));
  const money = (value) => (value === null ? "–" : value < 1 ? digits(value, 2) : value < 1000 ? value.toFixed(2) : number(value));
  const percent = (value) => `${value < 0.01 ? digits(100 * value, 2) : (100 * value).toFixed(0)} %`;
  const seconds = (value) => {
    if (value < 1) return `${digits(1000 * value, 3)} ms`;
    if (value < 60) return `${value.toFixed(1)} s`;
    const minutes = Math.floor(value / 60), hours = Math.floor(minutes / 60);
    if (hours < 1) return `${minutes} min ${Math.floor(value % 60)} s`;
    return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
  };
  const link = (value) => (value * 8 >= 1e9 ? `${digits(value * 8 / 1e9, 3)} Gbit/s` : `${digits(value * 8 / 1e6, 3)} Mbit/s`);

  // Steps of one worker to a value of its metric, on straight lines between evaluations, as plan reckons them.
  const stepsTo = (curve, target, higher) => {
    const sign = higher ? 1 : -1;
    let before = null;
    for (const [step, value] of curve) {
      if (sign * value >= sign * target)
        return before === null ? step : before[0] + (target - before[1]) / (value - before[1]) * (step - before[0]);
      before = [step, value];
    }
    return null;
  };

  const logarithmic = (low, high) => ({ min: 0, max: 1000, to: (at) => low * (high / low) ** (at / 1000),
    from: (value) => Math.round(1000 * Math.log(Math.max(low, value ?? 1) / low) / Math.log(high / low)) });

  const sliders = (data) => {
    const inputs = data.inputs, counts = data.workers;
    const list = [
      { key: "workers", title: "workers", min: 0, max: counts.length - 1, to: (at) => counts[at],
        from: (value) => Math.max(0, counts.indexOf(value)), value: data.chosen, shown: number },
      { key: "price_per_hour", title: "price of a device and hour", ...logarithmic(0.01, 100), value: inputs.price_per_hour, shown: number },
      { key: "bytes_per_second", title: "link between nodes", ...logarithmic(1.25e6, 1.25e12), value: inputs.bytes_per_second, shown: link },
    ];
    if (data.curve.length > 1) {
      const values = data.curve.map(([, value]) => value);
      const low = Math.min(...values), high = Math.max(...values);
      list.push({ key: "target", title: `target ${data.metric}`, min: 0, max: 1000, to: (at) => low + (high - low) * at / 1000,
        from: (value) => Math.round(1000 * (value - low) / (high - low || 1)), value: data.target ?? (data.higher ? high : low), shown: number });
    } else {
      list.push({ key: "single_steps", title: "steps of one worker",
        ...logarithmic(Math.max(1, inputs.single_steps / 100), inputs.single_steps * 100), value: inputs.single_steps, shown: number });
    }
    return list;
  };

  const settings = (data, chosen) => {
    const inputs = { ...data.inputs };
    for (const key of ["price_per_hour", "bytes_per_second", "single_steps"]) if (key in chosen) inputs[key] = chosen[key];
    if (inputs.bytes_per_second !== data.inputs.bytes_per_second) inputs.latency_seconds = data.rate_latency_seconds;  // as plan --link RATE
    if ("target" in chosen) inputs.single_steps = stepsTo(data.curve, chosen.target, data.higher) ?? inputs.single_steps;
    return inputs;
  };

  const COLUMNS = [
    ["workers", (row) => number(row.workers)], ["global batch", (row) => number(row.global_batch)], ["LR", (row) => number(row.lr)],
    ["steps", (row) => number(row.steps)], ["samples", (row) => number(row.samples)], ["step", (row) => seconds(row.step_seconds)],
    ["time", (row) => seconds(row.seconds)], ["cost", (row) => money(row.cost)],
    ["efficiency", (row) => percent(row.efficiency)], ["limited by", (row) => row.limit],
  ];

  const table = (place, rows, workers) => {
    const head = element("thead"), body = element("tbody"), titles = element("tr");
    for (const [title] of COLUMNS) titles.append(element("th", { scope: "col", class: title === "limited by" ? "" : "number" }, title));
    head.append(titles);
    for (const row of rows) {
      const line = element("tr", row.workers === workers ? { class: "chosen" } : {});
      COLUMNS.forEach(([title, show], order) => {
        const text = show(row) + (order === 0 && row.extrapolated ? " *" : "");
        line.append(element(order ? "td" : "th", { class: title === "limited by" ? "" : "number", ...(order ? {} : { scope: "row" }) }, text));
      });
      body.append(line);
    }
    place.replaceChildren(element("caption", {}, "The plan at these settings (* beyond what was trained)"), head, body);
  };

  // Round numbers: 1, 2 and 5 times powers of ten on logarithmic scales, of which fewer if they are many.
  const roundNumbers = (low, high, linear) => {
    if (linear) return [0, 0.2, 0.4, 0.6, 0.8, 1];
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1)
      for (const factor of [1, 2, 5]) if (factor * 10 ** power >= low && factor * 10 ** power <= high) found.push(factor * 10 ** power);
    const most = 6;
    return found.length <= most ? found : found.filter((_, order) => order % Math.ceil(found.length / most) === 0);
  };

  const chart = (title, unit, rows, of, ideal, workers, linear = false) => {
    const values = rows.map(of).concat(rows.map(ideal)).filter((value) => value > 0);
    const ends = (list) => { const low = Math.min(...list), high = Math.max(...list); return low < high ? [low, high] : [low / 2, high * 2]; };
    const [left, right] = ends(rows.map((row) => row.workers)), [low, high] = linear ? [0, Math.max(1, ...values)] : ends(values);
    const across = (value) => LEFT + (WIDTH - RIGHT - LEFT) * Math.log(value / left) / Math.log(right / left);
    const share = (value) => (linear ? (value - low) / (high - low) : Math.log(value / low) / Math.log(high / low));
    const up = (value) => HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share(value);
    const now = rows.find((row) => row.workers === workers);
    const words = `${title}: ${unit(of(now))} with ${now.workers} workers; ideal ${unit(ideal(now))}.`;
    const drawing = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": words });
    for (const tick of roundNumbers(low, high, linear)) {
      drawing.append(shape("path", { class: "grid", d: `M${LEFT} ${up(tick)}H${WIDTH - RIGHT}` }));
      drawing.append(shape("text", { class: "tick", x: LEFT - 6, y: up(tick) + 4 }, unit(tick).replace(/ (min|h) \d+ (s|min)$/, " $1").replace(".0 s", " s")));
    }
    let free = 0;
    for (const row of rows) {
      const text = number(row.workers), place = Math.min(across(row.workers), WIDTH - 2 - 4 * text.length);
      if (place - 4 * text.length < free) continue;
      free = place + 4 * text.length + 8;
      drawing.append(shape("text", { class: "under", x: place, y: HEIGHT - BOTTOM + 17 }, text));
    }
    drawing.append(shape("path", { class: "axis", d: `M${LEFT} ${TOP}V${HEIGHT - BOTTOM}H${WIDTH - RIGHT}` }));
    drawing.append(shape("text", { class: "title", x: WIDTH - RIGHT, y: HEIGHT - 6 }, "workers"));
    [[of, 0], [ideal, 1]].forEach(([value, look]) => {
      const group = shape("g", { class: `look${look}` });
      const points = rows.map((row) => `${across(row.workers).toFixed(1)},${up(value(row)).toFixed(1)}`).join(" ");
      group.append(shape("polyline", { class: "line", points }));
      if (look === 0) group.append(shape("circle", { class: "dot", cx: across(now.workers), cy: up(of(now)), r: 6 }));
      drawing.append(group);
    });
    const figure = element("figure");
    figure.append(element("figcaption", {}, `${title} (dashed: ideal)`), drawing);
    return figure;
  };

  const draw = (place, data, chosen) => {
    const inputs = settings(data, chosen), workers = chosen.workers;
    const rows = data.workers.map((count) => planModel.row(inputs, count));
    const now = rows.find((row) => row.workers === workers), one = planModel.row(inputs, 1);
    place.querySelector(".said").textContent = `${number(workers)} worker${workers === 1 ? "" : "s"}: ${seconds(now.seconds)} and `
      + `${now.cost === null ? "no price" : `a cost of ${money(now.cost)}`}${workers === 1 ? "" : `, ${digits(one.seconds / now.seconds, 3)} times as fast as one`}; `
      + `limited by ${now.limit}${now.extrapolated ? ", beyond what was trained" : ""}.`;
    const facts = COLUMNS.slice(1).map(([title, show]) => {
      const pair = element("div");
      pair.append(element("dt", {}, title), element("dd", { "data-fact": title }, show(now)));
      return pair;
    });
    place.querySelector(".outcome").replaceChildren(...facts);
    place.querySelector(".drawings").replaceChildren(
      chart("Time", seconds, rows, (row) => row.seconds, (row) => one.seconds / row.workers, workers),
      chart("Efficiency", percent, rows, (row) => row.efficiency, () => 1, workers, true),
      ...(now.cost ? [chart("Cost", (value) => digits(value, 3), rows, (row) => row.cost, () => one.cost, workers)] : []),
    );
    table(place.querySelector(".rows"), rows, workers);
    place.dataset.row = JSON.stringify(now);
    place.dataset.inputs = JSON.stringify(inputs);
  };

  const start = (place) => {
    const data = JSON.parse(place.querySelector(".data").textContent);
    const list = sliders(data), chosen = {};
    for (const slider of list) {
      const label = element("label", {}, `${slider.title} `), output = element("output");
      const input = element("input", { type: "range", min: slider.min, max: slider.max, step: 1, name: slider.key });
      input.value = slider.from(slider.value);
      if (slider.key !== "target") chosen[slider.key] = slider.value;  // before it is moved, the plan's own steps hold
      const tell = () => { output.textContent = slider.shown(chosen[slider.key] ?? slider.value); input.setAttribute("aria-valuetext", output.textContent); };
      input.addEventListener("input", () => { chosen[slider.key] = slider.to(Number(input.value)); tell(); draw(place, data, chosen); });
      tell();
      label.append(output, input);
      place.querySelector(".sliders").append(label);
    }
    place.hidden = false;
    draw(place, data, chosen);
  };

  return { start: (root) => root.querySelectorAll(".planner").forEach(start) };
})();
