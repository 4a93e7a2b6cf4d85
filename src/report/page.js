// Draws the charts of a page from the JSON in #data: curves, stacked bars and timelines, as SVG.
// Text from a run only ever becomes textContent or an attribute, never markup.
"use strict";
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "status");
  document.body.append(tip);

  const svg = (name, attributes = {}, text) => {
    const element = document.createElementNS(NS, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const html = (name, className, text) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const colour = index => `var(--c${index % 11})`;
  const PALE = 9;  // needs dark text in light pages, and light text in dark ones

  // --- numbers ---

  const significant = (value, digits) => String(Number(value.toPrecision(digits)));
  function short(value) {
    const size = Math.abs(value);
    if (size >= 1e12) return significant(value / 1e12, 4) + "T";
    if (size >= 1e9) return significant(value / 1e9, 4) + "B";
    if (size >= 1e6) return significant(value / 1e6, 4) + "M";
    if (size >= 1e4) return significant(value / 1e3, 4) + "k";
    if (size !== 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
    return significant(value, 5);
  }
  function bytes(value) {
    const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (Math.abs(value) >= 1024 && unit < 4) value /= 1024, ++unit;
    return significant(value, 3) + " " + units[unit];
  }
  const written = (value, unit) =>
    unit === "bytes" ? bytes(value) : unit ? `${significant(value, 5)} ${unit}` : short(value);

  function ticks(low, high, count, unit) {
    const base = unit === "bytes" ? 2 : 10;
    const rough = (high - low) / count;
    if (!(rough > 0) || !isFinite(rough)) return [low];
    const power = Math.pow(base, Math.floor(Math.log(rough) / Math.log(base)));
    const factor = base === 2 ? 1 : [1, 2, 5, 10].find(f => f * power >= rough * 0.7) || 10;
    const step = factor * power * (base === 2 && power < rough ? 2 : 1);
    const all = [];
    for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; ++i) all.push(i * step);
    return all;
  }
  function powers(low, high) {
    const all = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); ++p)
      for (const f of [1, 2, 5]) if (f * 10 ** p >= low && f * 10 ** p <= high) all.push(f * 10 ** p);
    return all.length > 7 ? all.filter(v => Math.log10(v) % 1 === 0) : all;
  }

  // --- what all charts share ---

  function show(event, text) {
    tip.textContent = text;
    tip.style.display = "block";
    const x = Math.min(event.pageX + 14, scrollX + innerWidth - tip.offsetWidth - 16);
    tip.style.left = Math.max(scrollX + 4, x) + "px";
    tip.style.top = event.pageY + 16 + "px";
  }
  const hide = () => { tip.style.display = "none"; };

  function legend(figure, entries, toggle) {
    const box = html("div", "legend");
    for (const entry of entries) {
      const one = html(toggle ? "button" : "span");
      const swatch = html("span", "swatch");
      swatch.style.background = colour(entry.colour);
      one.append(swatch, entry.name);
      if (toggle) {
        one.type = "button";
        one.setAttribute("aria-pressed", "true");
        one.onclick = () => {
          entry.hidden = !entry.hidden;
          one.setAttribute("aria-pressed", String(!entry.hidden));
          toggle();
        };
      }
      box.append(one);
    }
    figure.querySelector("h3").after(box);
  }

  // A drag over the drawing chooses a range of x; the button goes back to everything.
  function zoomable(figure, state, draw) {
    const tools = html("div", "tools");
    const whole = html("button", "", "show all");
    whole.type = "button";
    whole.hidden = true;
    whole.onclick = () => { state.view = null; whole.hidden = true; draw(); };
    tools.append(whole);
    figure.prepend(tools);
    state.tools = tools;
    state.choose = (low, high) => { state.view = [low, high]; whole.hidden = false; draw(); };
  }
  function listen_for_drag(drawing, frame, state, value_at) {
    let start = null, box = null;
    const at = event => {
      const x = event.clientX - drawing.getBoundingClientRect().left;
      return Math.min(Math.max(x, frame.left), frame.right);
    };
    drawing.addEventListener("pointerdown", event => {
      if (event.button !== 0) return;
      start = at(event);
      box = svg("rect", { class: "chosen", y: frame.top, height: frame.bottom - frame.top });
      drawing.append(box);
      event.preventDefault();
    });
    drawing.addEventListener("pointermove", event => {
      if (start === null) return;
      box.setAttribute("x", Math.min(start, at(event)));
      box.setAttribute("width", Math.abs(at(event) - start));
    });
    const end = event => {
      if (start === null) return;
      const [a, b] = [Math.min(start, at(event)), Math.max(start, at(event))];
      start = null;
      box.remove();
      if (b - a > 6) state.choose(value_at(a), value_at(b));
    };
    drawing.addEventListener("pointerup", end);
    drawing.addEventListener("pointerleave", end);
  }
  function replace(figure, drawing) {
    const old = figure.querySelector("svg");
    if (old) old.replaceWith(drawing);
    else figure.append(drawing);
  }
  function named(drawing, chart) {
    drawing.setAttribute("role", "img");
    drawing.setAttribute("aria-label", chart.alt || chart.title || "");
    return drawing;
  }

  // --- curves ---

  function lines(figure, chart) {
    const state = { log: false, view: null };
    const draw = () => draw_lines(figure, chart, state, draw);
    zoomable(figure, state, draw);
    if (chart.series.length > 1) legend(figure, chart.series, draw);
    if (chart.log) {
      const button = html("button", "", "log scale");
      button.type = "button";
      button.setAttribute("aria-pressed", "false");
      button.onclick = () => {
        state.log = !state.log;
        button.setAttribute("aria-pressed", String(state.log));
        button.textContent = state.log ? "linear scale" : "log scale";
        draw();
      };
      state.tools.append(button);
    }
    return draw;
  }

  function range_of(chart, state) {
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    for (const one of chart.series) {
      if (one.hidden) continue;
      one.x.forEach((x, i) => {
        if (state.view && (x < state.view[0] || x > state.view[1])) return;
        x0 = Math.min(x0, x);
        x1 = Math.max(x1, x);
        for (const y of [one.y[i], one.low && one.low[i], one.high && one.high[i]]) {
          if (typeof y !== "number" || (state.log && y <= 0)) continue;
          y0 = Math.min(y0, y);
          y1 = Math.max(y1, y);
        }
      });
    }
    if (state.view) [x0, x1] = state.view;
    if (!(x0 <= x1)) return null;
    if (!(y0 <= y1)) [y0, y1] = state.log ? [0.1, 1] : [0, 1];
    if (chart.zero && !state.log) y0 = Math.min(0, y0);
    if (x0 === x1) x0 -= 1, x1 += 1;
    if (y0 === y1) state.log ? (y0 /= 2, y1 *= 2) : (y0 -= Math.abs(y0) / 10 || 1, y1 += Math.abs(y1) / 10 || 1);
    if (!state.log) {
      const room = (y1 - y0) * 0.05;
      if (!(chart.zero && y0 === 0)) y0 -= room;
      y1 += room;
    }
    return { x0, x1, y0, y1 };
  }

  // The path through points; a null ends a piece. A piece of one point gets a dot's length.
  function path_of(points) {
    let text = "", open = false;
    points.forEach((p, i) => {
      if (!p) { open = false; return; }
      text += `${open ? "L" : "M"}${p[0].toFixed(1)} ${p[1].toFixed(1)}`;
      if (!open && !points[i + 1]) text += "h1";
      open = true;
    });
    return text;
  }

  function draw_axes(drawing, frame, range, state, chart, px, py) {
    const ys = state.log ? powers(range.y0, range.y1) : ticks(range.y0, range.y1, 5, chart.unit);
    for (const y of ys) {
      drawing.append(svg("line", { class: "grid", x1: frame.left, x2: frame.right, y1: py(y), y2: py(y) }));
      const label = chart.unit === "bytes" ? bytes(y) : short(y);
      drawing.append(svg("text", { x: frame.left - 6, y: py(y) + 4, "text-anchor": "end" }, label));
    }
    for (const x of ticks(range.x0, range.x1, Math.max(2, (frame.right - frame.left) / 90)))
      if (Number.isInteger(x))
        drawing.append(svg("text", { x: px(x), y: frame.bottom + 17, "text-anchor": "middle" }, short(x)));
    drawing.append(svg("text", { x: frame.right, y: frame.bottom + 31, "text-anchor": "end" }, chart.x || "step"));
  }

  function draw_series(drawing, one, frame, point) {
    const inside = p => p && p[0] >= frame.left - 0.5 && p[0] <= frame.right + 0.5 ? p : null;
    const all = one.x.map((x, i) => inside(point(x, one.y[i])));
    if (one.low) {
      const upper = [], lower = [];
      one.x.forEach((x, i) => {
        const a = inside(point(x, one.high[i])), b = inside(point(x, one.low[i]));
        if (a && b) upper.push(a), lower.unshift(b);
      });
      if (upper.length > 1)
        drawing.append(svg("path", { class: "band", fill: colour(one.colour), d: path_of([...upper, ...lower]) + "Z" }));
    }
    if (one.points)
      for (const p of all) if (p)
        drawing.append(svg("circle", { cx: p[0], cy: p[1], r: 3.2, fill: colour(one.colour) }));
    drawing.append(svg("path", { class: "curve", stroke: colour(one.colour), d: path_of(all),
      ...(one.dashed ? { "stroke-dasharray": "5 4" } : {}) }));
  }

  function nearest(values, wanted) {
    let best = 0;
    values.forEach((v, i) => { if (Math.abs(v - wanted) < Math.abs(values[best] - wanted)) best = i; });
    return best;
  }
  function values_at(chart, x) {
    let at = null;
    const rows = [];
    for (const one of chart.series) {
      if (one.hidden || !one.x.length) continue;
      const i = nearest(one.x, x);
      if (at === null || Math.abs(one.x[i] - x) < Math.abs(at - x)) at = one.x[i];
      const y = one.y[i];
      let text = typeof y === "number" ? written(y, chart.unit) : "not finite";
      if (one.low && one.low[i] !== one.high[i] && typeof one.low[i] === "number")
        text += ` (${short(one.low[i])} to ${short(one.high[i])})`;
      rows.push(`${one.name}${one.points ? ` at ${one.x[i]}` : ""}: ${text}`);
    }
    for (const mark of chart.marks || []) if (mark.x === at) rows.push(mark.text);
    return { at, text: `${chart.x || "step"} ${at}\n${rows.join("\n")}` };
  }

  function draw_lines(figure, chart, state) {
    const width = figure.clientWidth || 500, height = 230;
    const frame = { left: 62, right: width - 10, top: 8, bottom: height - 36 };
    const drawing = named(svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0 }), chart);
    const range = range_of(chart, state);
    replace(figure, drawing);
    if (!range) return;
    const px = x => frame.left + (x - range.x0) / (range.x1 - range.x0) * (frame.right - frame.left);
    const scale = state.log ? Math.log10 : v => v;
    const py = y => frame.bottom - (scale(y) - scale(range.y0)) / (scale(range.y1) - scale(range.y0)) *
      (frame.bottom - frame.top);
    const point = (x, y) => typeof y !== "number" || (state.log && y <= 0) ? null : [px(x), py(y)];
    draw_axes(drawing, frame, range, state, chart, px, py);
    for (const mark of chart.marks || []) {
      const x = px(mark.x);
      if (x < frame.left || x > frame.right) continue;
      drawing.append(svg("line", { x1: x, x2: x, y1: frame.bottom - 7, y2: frame.bottom, stroke: colour(mark.colour), "stroke-width": 2 }));
    }
    for (const one of chart.series) if (!one.hidden) draw_series(drawing, one, frame, point);
    const cross = svg("line", { class: "cross", y1: frame.top, y2: frame.bottom, visibility: "hidden" });
    drawing.append(cross);
    const value_at = x => range.x0 + (x - frame.left) / (frame.right - frame.left) * (range.x1 - range.x0);
    let looked = null;
    const look = (event, x) => {
      const seen = values_at(chart, x);
      looked = seen.at;
      if (looked === null) return;
      cross.setAttribute("x1", px(looked));
      cross.setAttribute("x2", px(looked));
      cross.setAttribute("visibility", "visible");
      show(event, seen.text);
    };
    const leave = () => { hide(); cross.setAttribute("visibility", "hidden"); };
    drawing.addEventListener("pointermove", event =>
      look(event, value_at(event.clientX - drawing.getBoundingClientRect().left)));
    drawing.addEventListener("pointerleave", leave);
    drawing.addEventListener("blur", leave);
    drawing.addEventListener("keydown", event => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way) return;
      const xs = [...new Set(chart.series.flatMap(one => one.hidden ? [] : one.x))].sort((a, b) => a - b);
      const i = looked === null ? (way > 0 ? 0 : xs.length - 1) : nearest(xs, looked) + way;
      const x = xs[Math.min(Math.max(i, 0), xs.length - 1)];
      const box = drawing.getBoundingClientRect();
      look({ pageX: scrollX + box.left + px(x), pageY: scrollY + box.top + frame.top }, x);
      event.preventDefault();
    });
    listen_for_drag(drawing, frame, state, value_at);
  }

  // --- stacked bars ---

  function bars(figure, chart) {
    const names = new Map();
    for (const row of chart.rows)
      for (const part of row.parts) if (!names.has(part.name)) names.set(part.name, part.colour);
    if (!chart.plain && chart.legend !== false) legend(figure, [...names].map(([name, c]) => ({ name, colour: c })));
    return () => draw_bars(figure, chart);
  }

  function fitting(text, width) {
    const most = Math.floor(width / 7);
    return text.length <= most ? text : most > 3 ? text.slice(0, most - 1) + "…" : "";
  }

  function draw_bars(figure, chart) {
    const width = figure.clientWidth || 500, step = 30;
    const totals = chart.rows.map(row => row.parts.reduce((sum, part) => sum + part.value, 0));
    const most = Math.max(chart.most || 0, ...totals) || 1;
    const longest = Math.max(0, ...chart.rows.map(row => row.name.length));
    const left = longest ? Math.min(Math.max(longest * 7 + 12, 60), width * 0.3) : 0;
    const right = width - (chart.plain ? 4 : 84);
    const height = chart.rows.length * step + 6;
    const drawing = named(svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` }), chart);
    chart.rows.forEach((row, i) => {
      const y = i * step + 4;
      if (left)
        drawing.append(svg("text", { class: "label", x: left - 8, y: y + 15, "text-anchor": "end" }, fitting(row.name, left - 8)));
      let x = left;
      for (const part of row.parts) {
        const long = part.value / most * (right - left);
        const box = svg("rect", { x, y, width: Math.max(long - 0.7, 0.3), height: step - 8, fill: colour(part.colour), rx: 2 });
        const text = `${row.name ? row.name + ": " : ""}${part.name}, ${part.text || written(part.value, chart.unit)}` +
          (chart.share && totals[i] ? ` (${(100 * part.value / totals[i]).toFixed(1)} %)` : "");
        box.append(svg("title", {}, text));
        box.addEventListener("pointermove", event => show(event, text));
        box.addEventListener("pointerleave", hide);
        drawing.append(box);
        const inside = part.inside === undefined ? part.name : part.inside;
        if (long > 34)
          drawing.append(svg("text", { class: part.colour === PALE ? "over" : "inside", x: x + 5, y: y + 15 }, fitting(inside, long - 8)));
        x += long;
      }
      if (!chart.plain)
        drawing.append(svg("text", { class: "label", x: x + 6, y: y + 15 }, row.total || written(totals[i], chart.unit)));
    });
    replace(figure, drawing);
  }

  // --- timelines ---

  function timeline(figure, chart) {
    const names = new Map();
    for (const lane of chart.lanes)
      for (const bar of lane.bars) if (!names.has(bar.kind)) names.set(bar.kind, bar.colour);
    const state = { view: null };
    const draw = () => draw_timeline(figure, chart, state);
    zoomable(figure, state, draw);
    legend(figure, [...names].map(([name, c]) => ({ name, colour: c })));
    return draw;
  }

  function draw_timeline(figure, chart, state) {
    const width = figure.clientWidth || 500, step = 30, top = chart.phases ? 20 : 4;
    const longest = Math.max(0, ...chart.lanes.map(lane => lane.name.length));
    const left = Math.min(Math.max(longest * 7 + 12, 60), width * 0.25);
    const frame = { left, right: width - 8, top, bottom: top + chart.lanes.length * step };
    const height = frame.bottom + 24;
    const [begin, end] = state.view || [chart.begin || 0, chart.end];
    const px = t => left + (t - begin) / (end - begin) * (frame.right - left);
    const drawing = named(svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` }), chart);
    for (const t of ticks(begin, end, Math.max(2, width / 120))) {
      drawing.append(svg("line", { class: "grid", x1: px(t), x2: px(t), y1: top, y2: frame.bottom }));
      drawing.append(svg("text", { x: px(t), y: frame.bottom + 16, "text-anchor": "middle" }, written(t, chart.unit)));
    }
    for (const phase of chart.phases || []) {
      const a = Math.max(px(phase.begin), left), b = Math.min(px(phase.end), frame.right);
      if (b - a < 2) continue;
      drawing.append(svg("line", { class: "grid", x1: a, x2: a, y1: 4, y2: frame.bottom }));
      drawing.append(svg("text", { class: "label", x: a + 4, y: 14 }, fitting(phase.name, b - a)));
    }
    chart.lanes.forEach((lane, i) => {
      const y = top + i * step;
      drawing.append(svg("text", { class: "label", x: left - 8, y: y + 17, "text-anchor": "end" }, fitting(lane.name, left - 8)));
      for (const bar of lane.bars) {
        const a = Math.max(px(bar.begin), left), b = Math.min(px(bar.end), frame.right);
        if (b < left || a > frame.right) continue;
        const box = svg("rect", { x: a, y: y + 3, width: Math.max(b - a, 0.8), height: step - 7, fill: colour(bar.colour), rx: 2 });
        const text = `${bar.name}\n${bar.kind}\n${written(bar.begin, chart.unit)} to ${written(bar.end, chart.unit)}` +
          ` (${written(bar.end - bar.begin, chart.unit)})${bar.text ? "\n" + bar.text : ""}`;
        box.append(svg("title", {}, text));
        box.addEventListener("pointermove", event => show(event, text));
        box.addEventListener("pointerleave", hide);
        drawing.append(box);
        if (b - a > 34)
          drawing.append(svg("text", { class: "inside", x: a + 4, y: y + 18 }, fitting(bar.name, b - a - 6)));
      }
    });
    replace(figure, drawing);
    listen_for_drag(drawing, frame, state, x => begin + (x - left) / (frame.right - left) * (end - begin));
  }

  // --- the page ---

  const kinds = { lines, bars, timeline };
  const charts = JSON.parse(document.getElementById("data").textContent);
  const redraw = [];
  document.querySelectorAll("figure[data-chart]").forEach(figure => {
    const chart = charts[Number(figure.dataset.chart)];
    try {  // one damaged chart doesn't take the others along
      const draw = kinds[chart.type](figure, chart);
      draw();
      redraw.push(draw);
    } catch (problem) {
      figure.append(html("p", "missing faint", `This chart can't be drawn: ${problem.message}`));
    }
  });
  let width = document.body.clientWidth;
  addEventListener("resize", () => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    redraw.forEach(draw => draw());
  });
})();
