"use strict";
// Draws the charts from the embedded data and makes the table sortable. Text is only ever written as text.
(() => {
  let { live, facets, series, rows } = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const DASHES = ["", "7 3", "2 2.5", "8 3 2 3", "4 2 1 2 1 2"];
  const MANY = 14; // series in one plot from which lines get thin and only the best are labelled
  const state = { facet: 0, words: [], hot: null, pinned: null, all: false, unfolded: new Set(), scrolled: 0, follow: null };

  // Elements -----------------------------------------------------------------------------------------------------------------
  function svg(name, attributes = {}, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }
  function html(name, attributes = {}, ...children) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }
  const drawn = (row) => row.ranked || (live && row.state === "unfinished"); // of a live page also what goes on
  const colour = (s) => (s.baseline ? "var(--ink)" : `var(--c${s.colour})`);

  function marker(kind, x, y, r) {
    const path = [
      `M${-r} 0A${r} ${r} 0 1 1 ${r} 0A${r} ${r} 0 1 1 ${-r} 0Z`,
      `M${-r * 0.9} ${-r * 0.9}H${r * 0.9}V${r * 0.9}H${-r * 0.9}Z`,
      `M0 ${-r * 1.2}L${r * 1.1} ${r * 0.9}H${-r * 1.1}Z`,
      `M0 ${-r * 1.3}L${r * 1.3} 0L0 ${r * 1.3}L${-r * 1.3} 0Z`,
      `M0 ${r * 1.2}L${r * 1.1} ${-r * 0.9}H${-r * 1.1}Z`,
    ][kind % 5];
    return svg("path", { class: "dot", d: path, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` });
  }

  // A point that lies further down than the chart goes.
  const further = (x, y) => svg("path", { class: "further", d: `M${x - 5} ${y - 4}H${x + 5}L${x} ${y + 5}Z` });

  // Numbers ------------------------------------------------------------------------------------------------------------------
  const digits = (v) => {
    const size = Math.abs(v);
    if (size >= 100 || size === 0) return Math.round(v).toLocaleString("en");
    return size >= 10 ? v.toFixed(1) : size >= 1 ? v.toFixed(2) : String(Number(v.toPrecision(3)));
  };
  const percent = (v) => `${(v * 100).toFixed(1)} %`;
  const scored = (v) => (facets[state.facet].by_loss ? `test loss ${digits(-v)}` : percent(v));
  const short = (v) => (v >= 1000 ? v.toLocaleString("en") : String(Number(v.toPrecision(6))));

  function ticks(low, high, count) {
    const raw = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(Number((k * step).toPrecision(12)));
    return found;
  }
  function logTicks(low, high, count) {
    const found = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
      for (const m of [1, 2, 5]) found.push(m * 10 ** e);
    }
    const inside = found.filter((t) => t >= low && t <= high);
    const decades = inside.filter((t) => Math.abs(Math.log10(t) - Math.round(Math.log10(t))) < 1e-9);
    if (decades.length < 2) return inside;
    return inside.length <= count ? inside : decades.filter((_, i) => i % Math.ceil(decades.length / count) === 0);
  }
  const linear = (low, high, from, to) => (v) => from + ((v - low) / (high - low || 1)) * (to - from);
  const log = (low, high, from, to) => (v) => from + (Math.log(v / low) / Math.log(high / low || 2)) * (to - from);

  const pen = document.createElement("canvas").getContext("2d");
  const width = (text, size = 12) => {
    pen.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
    return pen.measureText(text).width;
  };

  // Highlight and tooltip ----------------------------------------------------------------------------------------------------
  function highlight(index) {
    state.hot = index === null ? state.pinned : index;
    document.body.classList.toggle("focusing", state.hot !== null);
    for (const element of document.querySelectorAll("[data-series]")) {
      element.classList.toggle("hot", Number(element.dataset.series) === state.hot);
    }
  }
  function showTip(row, at, x, y) {
    const tip = byId("tip");
    const list = html("dl");
    for (const [name, value] of row.tip) list.append(html("dt", {}, name), html("dd", {}, value));
    tip.replaceChildren(html("strong", {}, series[row.series].label));
    if (at) tip.append(html("p", { class: "at" }, at));
    tip.append(list);
    tip.hidden = false;
    state.scrolled = scrollY;
    placeTip(x, y);
  }
  function placeTip(x, y) {
    const tip = byId("tip");
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width < innerWidth - 8 ? x + 16 : Math.max(8, x - 16 - box.width);
    tip.style.left = `${Math.min(left, Math.max(8, innerWidth - 8 - box.width))}px`;
    tip.style.top = `${Math.max(8, Math.min(y - box.height / 2, innerHeight - 8 - box.height))}px`;
  }
  function hideTip() {
    byId("tip").hidden = true;
    for (const mark of document.querySelectorAll(".near")) mark.classList.remove("near");
  }
  // Focus scrolls its element into view: the tooltip goes with it. A pointer's tooltip ends when the page moves away under it.
  function scrolling() {
    if (byId("tip").hidden) return;
    if (state.follow && document.activeElement?.closest(".mark")) placeTip(...state.follow());
    else if (Math.abs(scrollY - state.scrolled) > 4) hideTip();
  }
  function rest() {
    hideTip();
    highlight(null);
  }

  // A plot: axes, marks (one per series, focusable), and the nearest target under the pointer --------------------------------
  function begin(figure, height, margin) {
    const place = byId(figure).querySelector(".plot");
    const w = Math.max(240, place.clientWidth);
    const root = svg("svg", { viewBox: `0 0 ${w} ${height}`, height, role: "group", "aria-label": byId(figure).querySelector("h3").textContent });
    const area = { left: margin.left, right: w - margin.right, top: margin.top, bottom: height - margin.bottom };
    root.append(svg("rect", { class: "area", x: area.left, y: area.top, width: area.right - area.left, height: area.bottom - area.top, fill: "none", "pointer-events": "all" }));
    place.replaceChildren(root);
    return { root, area, w, targets: [], groups: [] };
  }
  function axisX(plot, at, values, form, title) {
    const { root, area } = plot;
    root.append(svg("line", { class: "axis", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }));
    let end = -Infinity;
    for (const value of values) {
      const half = width(form(value)) / 2;
      if (at(value) - half < end + 8) continue;
      end = at(value) + half;
      root.append(svg("text", { x: at(value), y: area.bottom + 18, "text-anchor": "middle" }, form(value)));
    }
    const right = Math.max(area.right, Math.min(plot.w, width(title) + 2)); // a long title takes the margin too
    root.append(svg("text", { x: right, y: area.bottom + 38, "text-anchor": "end" }, title));
  }
  function axisY(plot, at, values, form) {
    const { root, area } = plot;
    for (const value of values) {
      root.append(svg("line", { class: "grid", x1: area.left, x2: area.right, y1: at(value), y2: at(value) }));
      root.append(svg("text", { x: area.left - 8, y: at(value) + 4, "text-anchor": "end" }, form(value)));
    }
  }
  // Better is higher: accuracies in per cent, test losses (minus the score) on a reversed axis.
  function scoreAxis(plot, values, whole = false) {
    const low = Math.min(...values), high = Math.max(...values);
    if (facets[state.facet].by_loss) {
      const pad = Math.max((high - low) * 0.06, Math.abs(high) * 0.01);
      const at = linear(low - pad, Math.min(0, high + pad), plot.area.bottom, plot.area.top);
      axisY(plot, at, ticks(low - pad, Math.min(0, high + pad), 5), (v) => short(v ? -v : 0));
      return at;
    }
    const pad = Math.max((high - low) * 0.06, (0.02 - (high - low)) / 2); // at least two points: less is chance drawn large
    const bottom = Math.max(0, low - pad);
    let top = Math.min(1, high + pad);
    let marks = ticks(bottom * 100, top * 100, 5);
    if (whole && marks.length > 1) { // so that the highest lines end below a labelled tick
      top = Math.min(1, (marks.at(-1) + (marks.at(-1) < top * 100 ? marks[1] - marks[0] : 0)) / 100);
      marks = ticks(bottom * 100, top * 100, 5);
    }
    const at = linear(bottom, top, plot.area.bottom, plot.area.top);
    axisY(plot, (v) => at(v / 100), marks, (v) => `${short(v)} %`);
    return at;
  }
  function lossAxis(plot, values) {
    const low = Math.min(...values), high = Math.max(...values), pad = Math.max((high - low) * 0.06, Math.abs(high) * 0.01);
    const bottom = low >= 0 ? Math.max(0, low - pad) : low - pad;
    const at = linear(bottom, high + pad, plot.area.bottom, plot.area.top);
    axisY(plot, at, ticks(bottom, high + pad, 5), short);
    return at;
  }
  function group(plot, row, extra = "") {
    const s = series[row.series];
    const names = `mark ${s.baseline ? "baseline" : ""} ${drawn(row) ? "" : "unranked"} ${extra}`;
    const element = svg("g", { class: names, "data-series": row.series, style: `--c:${colour(s)}`, tabindex: -1, role: "img", "aria-label": describe(row) });
    plot.root.append(element);
    plot.groups.push(element);
    return element;
  }
  const describe = (row) => `${series[row.series].label}: ${row.tip.map((pair) => pair.join(" ")).join(", ")}`;

  function finish(plot) {
    const { root, targets, groups } = plot;
    const screen = (target) => {
      const box = root.getBoundingClientRect();
      return [box.left + target.x, box.top + target.y];
    };
    const choose = (target, x, y, follow = null) => {
      hideTip();
      state.follow = follow;
      highlight(target.row.series);
      target.group.classList.add("near");
      if (target.halo) target.halo(target);
      showTip(target.row, target.at, x, y);
    };
    const look = (event) => {
      const box = root.getBoundingClientRect();
      const x = event.clientX - box.left, y = event.clientY - box.top;
      const reach = event.pointerType === "touch" ? 44 : 28;
      let best = null, least = reach;
      for (const target of targets) {
        if (target.group.classList.contains("out")) continue;
        const distance = target.band ? (Math.abs(y - target.y) <= target.band ? Math.abs(x - target.x) / plot.w : Infinity) : Math.hypot(x - target.x, y - target.y);
        if (distance < least) [best, least] = [target, distance];
      }
      if (best) choose(best, event.clientX, event.clientY);
      else rest();
    };
    root.addEventListener("pointermove", look);
    root.addEventListener("pointerdown", look);
    root.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && rest());
    groups.forEach((element, index) => {
      element.setAttribute("tabindex", index === 0 ? 0 : -1); // one tab stop per plot, arrows go on from there
      const last = targets.filter((t) => t.group === element).at(-1);
      element.addEventListener("focus", () => last && choose(last, ...screen(last), () => screen(last)));
      element.addEventListener("blur", rest);
      element.addEventListener("keydown", (event) => {
        const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (event.key === "Escape") rest();
        if (!move) return;
        event.preventDefault();
        const visible = groups.filter((g) => !g.classList.contains("out") || g === element);
        const next = visible[(visible.indexOf(element) + move + visible.length) % visible.length];
        element.setAttribute("tabindex", -1);
        next.setAttribute("tabindex", 0);
        next.focus();
      });
    });
  }
  function halo(element) {
    const ring = svg("circle", { class: "halo", r: 8 });
    element.append(ring);
    return (target) => { ring.setAttribute("cx", target.x); ring.setAttribute("cy", target.y); };
  }
  function say(figure, sentence) {
    byId(figure).querySelector(".plot").replaceChildren(html("p", { class: "note" }, sentence));
  }
  function caption(figure, title, text) {
    byId(figure).querySelector("h3").textContent = title;
    byId(figure).querySelector("figcaption p").textContent = text;
  }

  // Lines: scores against epochs, seconds or MB ----------------------------------------------------------------------------
  const EPOCH = 0, SCORE = 1, SPREAD = 2, SECONDS = 3, MB = 4, LOSS = 5;

  function lines(figure, chosen, x, options) {
    const of = options.of ?? SCORE;
    const tracks = chosen
      .map((row) => ({ row, points: row.curve.filter((p) => p[of] !== null && p[x] !== null && (!options.log || p[x] > 0)) }))
      .filter((track) => track.points.length);
    if (!tracks.length) return say(figure, options.empty);
    const many = tracks.length > MANY;
    const plot = begin(figure, innerWidth < 560 ? 300 : 380, { left: 46, right: 34, top: 10, bottom: 46 });
    plot.root.classList.toggle("many", many);
    const heights = tracks.flatMap((t) => t.points.map((p) => p[of]));
    const y = of === LOSS ? lossAxis(plot, heights) : scoreAxis(plot, heights, true);
    const xs = tracks.flatMap((t) => t.points.map((p) => p[x]));
    let low = Math.min(...xs), high = Math.max(...xs);
    const count = Math.max(3, Math.floor(plot.w / 90));
    let at, values;
    if (options.log) {
      [low, high] = [low / 1.25, high * 1.25];
      [at, values] = [log(low, high, plot.area.left, plot.area.right), logTicks(low, high, count)];
    } else {
      low = x === EPOCH ? Math.min(1, low) : 0;
      if (high === low) high = low + 1;
      at = linear(low, high, plot.area.left, plot.area.right);
      values = ticks(low, high, count).filter((v) => x !== EPOCH || Number.isInteger(v));
      if (x === EPOCH && low === 1 && !values.includes(1)) values = [1, ...values.filter((v) => at(v) - at(1) > 24)];
    }
    axisX(plot, at, values, short, options.title);
    tracks.sort((a, b) => series[a.row.series].baseline - series[b.row.series].baseline);
    for (const track of tracks) {
      const s = series[track.row.series];
      const element = group(plot, track.row);
      const places = track.points.map((p) => [at(p[x]), y(p[of])]);
      if (!many && x === EPOCH && of === SCORE && track.points.every((p) => p[SPREAD])) {
        const inside = (v) => Math.max(plot.area.top, Math.min(plot.area.bottom, v));
        const edge = (sign) => track.points.map((p) => `${at(p[x]).toFixed(1)} ${inside(y(p[SCORE] + sign * p[SPREAD])).toFixed(1)}`);
        element.append(svg("path", { class: "band", d: `M${edge(1).join("L")}L${edge(-1).reverse().join("L")}Z` }));
      }
      const path = `M${places.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L")}`;
      element.append(svg("path", { class: "line", d: path, "stroke-dasharray": DASHES[s.mark % DASHES.length] }));
      const every = many || places.length > 15 ? [places.at(-1)] : places;
      for (const [a, b] of every) element.append(marker(s.mark, a, b, many ? 2.5 : 3.2));
      const ring = halo(element);
      track.points.forEach((p, i) => plot.targets.push({
        x: places[i][0], y: places[i][1], row: track.row, group: element, halo: ring, at: options.at(p),
      }));
      track.end = places.at(-1);
      track.element = element;
    }
    if (x === EPOCH) endLabels(plot, tracks, many);
    else nearLabels(plot, tracks);
    finish(plot);
  }

  // Numbers at line ends, keyed to the legend and pushed apart; at many lines only for the best and the baseline.
  function endLabels(plot, tracks, many) {
    let named = tracks.filter((t) => drawn(t.row)).sort((a, b) => b.row.score - a.row.score);
    if (many) named = named.filter((t, i) => i < 3 || series[t.row.series].baseline);
    named.sort((a, b) => a.end[1] - b.end[1]);
    const ys = apart(named.map((t) => t.end[1]), 12, plot.area.top, plot.area.bottom);
    const x = Math.max(...named.map((t) => t.end[0]));
    named.forEach((track, i) => {
      const text = String(series[track.row.series].number);
      if (Math.abs(ys[i] - track.end[1]) > 3) track.element.append(svg("line", { class: "leader", x1: track.end[0] + 4, y1: track.end[1], x2: x + 13, y2: ys[i] }));
      track.element.append(svg("text", { x: x + 16, y: ys[i] + 4, class: "label", style: "font-size:11px" }, text));
    });
  }
  // Sorted places at least `gap` apart, each cluster centred on where its members wanted to be.
  function apart(wanted, gap, low, high) {
    const clusters = [];
    for (const y of wanted) {
      clusters.push({ sum: y, count: 1 });
      for (;;) {
        const [a, b] = clusters.slice(-2);
        if (!b || b.sum / b.count - a.sum / a.count >= (gap * (a.count + b.count)) / 2) break;
        clusters.splice(-2, 2, { sum: a.sum + b.sum, count: a.count + b.count });
      }
    }
    const places = clusters.flatMap((c) => Array.from({ length: c.count }, (_, i) => c.sum / c.count + (i - (c.count - 1) / 2) * gap));
    const over = Math.max(0, (places.at(-1) ?? 0) - high);
    const shifted = places.map((y) => y - over);
    const under = Math.max(0, low - (shifted[0] ?? low));
    return shifted.map((y) => y + under);
  }

  // Frontier -----------------------------------------------------------------------------------------------------------------
  function frontier(chosen) {
    const shown = chosen.filter((row) => row.ranked && row.mb > 0);
    byId("frontier").hidden = live && shown.length < 2;
    if (!shown.length) return say("frontier", "There is nothing to draw: no finished run here sent anything.");
    const plot = begin("frontier", innerWidth < 560 ? 340 : 440, { left: 46, right: 18, top: 14, bottom: 46 });
    const best = shown.filter((row) => row.frontier).sort((a, b) => a.mb - b.mb);
    // A little under the frontier the chart ends: a few failures far down would leave the rest a thin stripe.
    const heights = (best.length ? best : shown).map((row) => row.score);
    const least = Math.min(...heights), span = Math.max(...heights) - least;
    const floor = Math.max(Math.min(...shown.map((row) => row.score)), least - Math.max(0.03 * (facets[state.facet].by_loss ? Math.abs(least) : 1), span / 4));
    const height = (row) => Math.max(floor, row.score);
    const y = scoreAxis(plot, shown.map(height));
    const sent = shown.map((row) => row.mb);
    const [low, high] = [Math.min(...sent) / 1.6, Math.max(...sent) * 1.6];
    const x = log(low, high, plot.area.left, plot.area.right);
    axisX(plot, x, logTicks(low, high, Math.max(3, Math.floor(plot.w / 80))), short, shown.some((row) => row.score < floor) ? "MB sent per worker (log scale); ▽ further down" : "MB sent per worker (log scale)");
    const steps = best.map((row, i) => (i ? `H${x(row.mb)}V${y(row.score)}` : `M${x(row.mb)} ${y(row.score)}`));
    plot.root.append(svg("path", { class: "pareto", d: steps.join("") }));
    shown.sort((a, b) => a.frontier - b.frontier);
    for (const row of shown) {
      const element = group(plot, row, row.frontier || series[row.series].baseline ? "" : "faint");
      const place = { x: x(row.mb), y: y(height(row)) }, below = row.score < floor;
      element.append(below ? further(place.x, place.y) : marker(series[row.series].mark, place.x, place.y, row.frontier ? 5.5 : 4.2));
      plot.targets.push({ ...place, row, group: element, halo: halo(element), at: row.frontier ? "on the frontier" : below ? "further down than drawn" : "" });
    }
    placeLabels(plot, best.map((row) => [x(row.mb), y(row.score)]));
    finish(plot);
  }

  // Lines that end in different places: a number beside the end where there is room, for the best first.
  function nearLabels(plot, tracks) {
    const taken = plot.targets.map((t) => ({ x: t.x - 3, y: t.y - 3, w: 6, h: 6 }));
    for (const track of [...tracks].filter((t) => drawn(t.row)).sort((a, b) => b.row.score - a.row.score)) {
      const text = String(series[track.row.series].number);
      const target = { x: track.end[0], y: track.end[1] };
      const box = nearby(target, width(text, 11) + 3, 12, [7], (b) => !taken.some((t) => overlap(t, b)));
      if (!box) continue;
      taken.push(box);
      track.element.append(svg("text", { x: box.x + 1.5, y: box.y + 10, class: "label", style: "font-size:11px" }, text));
    }
  }
  const overlap = (a, b) => a.x < b.x + b.w && b.x < a.x + a.w && a.y < b.y + b.h && b.y < a.y + a.h;

  // Each label takes the nearest free place around its point; a leader line shows where it belongs when that is far.
  function placeLabels(plot, corners) {
    const taken = plot.targets.map((t) => ({ x: t.x - 6, y: t.y - 6, w: 12, h: 12 }));
    corners.slice(1).forEach(([x, y], i) => { // the frontier's steps, so that no label is struck through
      const [fromX, fromY] = corners[i];
      taken.push({ x: fromX, y: fromY - 1, w: x - fromX, h: 2 }, { x: x - 1, y, w: 2, h: fromY - y });
    });
    const { area } = plot;
    const free = (box) => box.x >= area.left + 2 && box.x + box.w <= plot.w - 2 && box.y >= area.top - 8 && box.y + box.h <= area.bottom - 2
      && !taken.some((t) => overlap(t, box));
    const important = (t) => (t.row.frontier ? 2 : 0) + (series[t.row.series].baseline ? 1 : 0);
    const order = [...plot.targets].sort((a, b) => important(b) - important(a) || b.row.score - a.row.score);
    for (const target of order) {
      const s = series[target.row.series];
      const wanted = important(target) ? [`${s.number}  ${s.label}`, String(s.number)] : [String(s.number)];
      const found = wanted.map((text) => [text, nearby(target, width(text, 12) + 4, 15, text === String(s.number) ? [9] : [9, 24, 42, 64], free)]).find((f) => f[1]);
      if (!found) continue;
      const [text, box] = found;
      taken.push(box);
      if (box.distance > 9) {
        const tx = Math.max(box.x, Math.min(target.x, box.x + box.w)), ty = Math.max(box.y, Math.min(target.y, box.y + box.h));
        target.group.append(svg("line", { class: "leader", x1: target.x, y1: target.y, x2: tx, y2: ty }));
      }
      target.group.append(svg("text", { class: important(target) ? "named" : "", x: box.x + 2, y: box.y + 12 }, text));
    }
  }
  function nearby(target, w, h, distances, free) {
    for (const distance of distances) {
      for (const [dx, dy] of [[1, 0], [-1, 0], [0, -1], [0, 1], [0.8, -0.8], [-0.8, -0.8], [0.8, 0.8], [-0.8, 0.8]]) {
        const cx = target.x + dx * distance, cy = target.y + dy * distance;
        const box = {
          x: dx > 0 ? cx : dx < 0 ? cx - w : cx - w / 2,
          y: dy === 0 ? cy - h / 2 : dy > 0 ? cy : cy - h,
          w, h, distance,
        };
        if (free(box)) return box;
      }
    }
    return null;
  }

  // Where seconds come from: never a prediction without its cluster.
  const origin = (facet) => (facet.cluster ? `, predicted for ${facet.cluster}` : facet.kind === "virtual" ? ", by a virtual clock" : ", measured");
  const inSeconds = (facet) => (facet.cluster ? `seconds, predicted for ${facet.cluster}` : "seconds");

  // Bars ---------------------------------------------------------------------------------------------------------------------
  function bars(chosen) {
    const facet = facets[state.facet];
    caption("bars", "Where the seconds went", `Seconds of ${live ? "all epochs so far" : "the whole run"}, mean over workers${origin(facet)}. Wait and transfer together are synchronisation; transfer is communication.`);
    const timed = chosen.filter((row) => drawn(row) && row.compute !== null && row.wait !== null && row.transfer !== null).sort((a, b) => a.seconds - b.seconds);
    if (!timed.length) {
      return say("bars", facet.kind === "virtual" ? "Virtual workers have no clock without --cluster: their bytes are counted, their seconds are not known." : "No finished run here recorded seconds.");
    }
    const shown = folded("bars", timed);
    const { plot, place, line } = roster("bars", shown, { thick: 16, right: 64 });
    const high = Math.max(...shown.map((row) => row.seconds));
    const x = linear(0, high || 1, plot.area.left, plot.area.right);
    const values = ticks(0, high || 1, Math.max(3, Math.floor((plot.area.right - plot.area.left) / 90)));
    for (const value of values) plot.root.append(svg("line", { class: "grid", x1: x(value), x2: x(value), y1: plot.area.top, y2: plot.area.bottom }));
    axisX(plot, x, values, short, inSeconds(facet));
    shown.forEach((row, i) => {
      const { element, top, middle, band } = line(row, i);
      let from = 0;
      for (const part of ["compute", "wait", "transfer"]) {
        const wide = Math.max(0, x(from + row[part]) - x(from));
        element.append(svg("rect", { class: "segment", x: x(from), y: top, width: wide.toFixed(2), height: 16, fill: `var(--${part})` }));
        from += row[part];
      }
      element.append(svg("text", { x: x(from) + 6, y: top + 12 }, `${digits(row.seconds)} s`));
      plot.targets.push({ x: x(from), y: middle, band, row, group: element, at: `synchronisation ${digits(row.wait + row.transfer)} s` });
    });
    finish(plot);
    const key = html("div", { class: "parts legend-parts" });
    for (const part of ["compute", "wait", "transfer"]) {
      const swatch = html("i");
      swatch.style.background = `var(--${part})`;
      key.append(html("span", {}, swatch, part));
    }
    place.prepend(key);
    foldButton("bars", timed.length, "Show the fastest only");
  }

  // Step times: a dot per worker, so that those whom the others wait for stand apart -------------------------------------------
  function steps(chosen) {
    const facet = facets[state.facet];
    const found = chosen.filter((row) => row.steps).sort((a, b) => b.steps.workers[0][1] - a.steps.workers[0][1]);
    byId("steps").hidden = !found.length;
    if (!found.length) return;
    caption("steps", "Who is slow", `What a step computes on each worker, in the middle (p50) since the start${origin(facet)}. Where workers wait for each other, all wait for the dot on the right.`);
    const shown = folded("steps", found);
    const aside = Math.max(...shown.map((row) => width(row.steps.text))) + 14;
    const { plot, narrow, line } = roster("steps", shown, { thick: 16, right: aside, aside });
    const high = Math.max(...shown.map((row) => row.steps.workers[0][1]));
    const [scale, unit] = high < 1 ? [1000, "ms"] : [1, "seconds"];
    const x = linear(0, high * scale * 1.03 || 1, plot.area.left, plot.area.right);
    const values = ticks(0, high * scale * 1.03 || 1, Math.max(3, Math.floor((plot.area.right - plot.area.left) / 90)));
    for (const value of values) plot.root.append(svg("line", { class: "grid", x1: x(value), x2: x(value), y1: plot.area.top, y2: plot.area.bottom }));
    axisX(plot, x, values, short, `${unit} of a step${facet.cluster ? `, predicted for ${facet.cluster}` : ""}`);
    shown.forEach((row, i) => {
      const { element, top, middle, band } = line(row, i);
      const ring = halo(element);
      [...row.steps.workers].reverse().forEach(([worker, p50, p99], k, all) => {
        const place = { x: x(p50 * scale), y: middle };
        element.append(marker(0, place.x, place.y, k === all.length - 1 ? 5 : 3.4));
        plot.targets.push({ ...place, band, row, group: element, halo: ring, at: `worker ${worker}: p50 ${digits(p50 * scale)}, p99 ${digits(p99 * scale)} ${unit}` });
      });
      element.append(svg("text", { x: plot.w - 2, y: narrow ? top - 5 : middle + 4, "text-anchor": "end" }, row.steps.text));
    });
    finish(plot);
    foldButton("steps", found.length, "Show the slowest only");
  }

  // Staleness of gradients: a small histogram per strategy, all on one axis -----------------------------------------------------
  function staleness(chosen) {
    const edges = facets[state.facet].staleness; // the first value of each column, and the one after the last
    const found = chosen.filter((row) => row.staleness).sort((a, b) => a.staleness.middle - b.staleness.middle || a.staleness.mean - b.staleness.mean);
    byId("staleness").hidden = !found.length;
    if (!found.length) return;
    const largest = edges.at(-1) - 1, single = edges.length === edges.at(-1) + 1;
    const wider = single ? "" : " Towards the right a column holds several values.";
    caption("staleness", "Staleness of gradients", `How many updates came between the weights that a gradient was computed at and its own. Height is the share of a strategy's gradients, its highest column being full; the solid one holds the median.${wider}`);
    const shown = folded("staleness", found);
    const aside = Math.max(...shown.map((row) => width(row.staleness.text))) + 14;
    const thick = 24;
    const { plot, narrow, line } = roster("staleness", shown, { thick, right: aside, aside });
    const step = (plot.area.right - plot.area.left) / (edges.length - 1);
    const x = (column) => plot.area.left + step * (column + 0.5);
    const wide = Math.min(26, Math.max(step * 0.5, step - 2));
    const name = (column) => (edges[column + 1] - edges[column] > 1 ? `${short(edges[column])}–${short(edges[column + 1] - 1)}` : short(edges[column]));
    const at = (value) => { // the position of a value in its column
      const column = edges.findIndex((edge) => edge > value) - 1;
      return x(column - 0.5 + (value + 0.5 - edges[column]) / (edges[column + 1] - edges[column]));
    };
    const values = single ? ticks(0, largest || 1, Math.max(3, Math.floor((plot.area.right - plot.area.left) / 45))).filter((v) => Number.isInteger(v) && v <= largest) : [0, ...logTicks(1, largest, Infinity)];
    axisX(plot, at, values, short, "staleness in updates");
    shown.forEach((row, i) => {
      const { element, top, middle, band } = line(row, i);
      const { counts } = row.staleness, most = Math.max(...counts), total = counts.reduce((a, b) => a + b);
      element.append(svg("line", { class: "grid", x1: plot.area.left, x2: plot.area.right, y1: top + thick, y2: top + thick }));
      const ring = svg("rect", { class: "halo", y: top - 1.5, height: thick + 3, width: wide + 3 });
      counts.forEach((count, column) => {
        if (!count) return;
        const high = Math.max(1.5, (thick * count) / most);
        element.append(svg("rect", { class: column === row.staleness.middle ? "column solid" : "column", x: (x(column) - wide / 2).toFixed(2), y: (top + thick - high).toFixed(2), width: wide.toFixed(2), height: high.toFixed(2) }));
        const told = `staleness ${name(column)}: ${count.toLocaleString("en")} of ${total.toLocaleString("en")} gradients, ${percent(count / total)}`;
        plot.targets.push({ x: x(column), y: middle, band, row, group: element, at: told, halo: (target) => ring.setAttribute("x", target.x - wide / 2 - 1.5), last: column === row.staleness.middle });
      });
      element.append(ring, svg("text", { x: plot.w - 2, y: narrow ? top - 5 : middle + 4, "text-anchor": "end" }, row.staleness.text));
    });
    plot.targets.sort((a, b) => a.last - b.last); // the keyboard shows a group's last target
    finish(plot);
    foldButton("staleness", found.length, "Show the least stale only");
  }

  // Strategies one below the other: names beside their rows, above them where it is narrow. `aside` is room at the right end. ---
  function roster(figure, shown, { thick, right, aside = 0 }) {
    const place = byId(figure).querySelector(".plot");
    const name = (row) => `${series[row.series].number}  ${series[row.series].label}`;
    const narrow = place.clientWidth < 620;
    const left = narrow ? 2 : Math.min(place.clientWidth * 0.45, Math.max(...shown.map((row) => width(name(row), 12))) + 14);
    const step = thick + (narrow ? 26 : 10);
    const plot = begin(figure, shown.length * step + 54, { left, right: narrow && aside ? 2 : right, top: 2, bottom: 46 });
    const line = (row, i) => {
      const element = group(plot, row);
      const top = plot.area.top + i * step + (narrow ? 20 : 5);
      const label = svg("text", { class: "named", x: narrow ? left : left - 10, y: narrow ? top - 5 : top + thick / 2 + 4, "text-anchor": narrow ? "start" : "end" }, name(row));
      element.append(label);
      fit(label, name(row), narrow ? plot.w - 4 - aside : left - 12);
      return { element, top, middle: top + thick / 2, band: step / 2 };
    };
    return { plot, place, narrow, line };
  }
  function folded(figure, found) {
    return state.unfolded.has(figure) || found.length <= 24 ? found : found.filter((row, i) => i < 20 || series[row.series].baseline);
  }
  function foldButton(figure, count, fewer) {
    if (count <= 24) return;
    const open = state.unfolded.has(figure);
    const button = html("button", { class: "more", type: "button" }, open ? fewer : `Show all ${count}`);
    button.addEventListener("click", () => { open ? state.unfolded.delete(figure) : state.unfolded.add(figure); draw(); });
    byId(figure).querySelector(".plot").append(button);
  }
  function fit(element, text, room) {
    let length = text.length;
    while (length > 4 && width(element.textContent, 12) > room) element.textContent = `${text.slice(0, --length)}…`;
  }

  // Worker counts ------------------------------------------------------------------------------------------------------------
  function workers() {
    const facet = facets[state.facet];
    const near = (f) => f.data === facet.data && f.model === facet.model && f.kind === facet.kind && f.study === facet.study && f.cluster === facet.cluster && f.by_loss === facet.by_loss;
    const found = rows.filter((row) => row.ranked && near(facets[row.facet]));
    const counts = [...new Set(found.map((row) => facets[row.facet].workers))].sort((a, b) => a - b);
    byId("workers").hidden = counts.length < 2;
    if (counts.length < 2) return;
    const kinds = [...new Set(found.map((row) => row.series))].sort((a, b) => a - b);
    const plot = begin("workers", innerWidth < 560 ? 320 : 380, { left: 46, right: 10, top: 10, bottom: 46 });
    const y = scoreAxis(plot, found.map((row) => row.score));
    const column = (plot.area.right - plot.area.left) / counts.length;
    const centre = (count) => plot.area.left + column * (counts.indexOf(count) + 0.5);
    counts.slice(1).forEach((count) => {
      const edge = centre(count) - column / 2;
      plot.root.append(svg("line", { class: "grid", x1: edge, x2: edge, y1: plot.area.top, y2: plot.area.bottom }));
    });
    axisX(plot, centre, counts, (c) => String(c), `workers (${facet.kind})`);
    for (const kind of kinds) {
      const own = found.filter((row) => row.series === kind).sort((a, b) => facets[a.facet].workers - facets[b.facet].workers);
      const shift = kinds.length > 1 ? (kinds.indexOf(kind) / (kinds.length - 1) - 0.5) * column * 0.72 : 0;
      const element = group(plot, own[0]);
      const place = (row) => [centre(facets[row.facet].workers) + shift, y(row.score)];
      element.append(svg("path", { class: "line slope", d: `M${own.map((row) => place(row).map((v) => v.toFixed(1)).join(" ")).join("L")}` }));
      for (const row of own) element.append(marker(series[kind].mark, ...place(row), kinds.length > MANY ? 3 : 4.5));
      const ring = halo(element);
      for (const row of own) {
        const [px, py] = place(row);
        plot.targets.push({ x: px, y: py, row, group: element, halo: ring, at: `${facets[row.facet].workers} ${facet.kind} workers` });
      }
      element.setAttribute("aria-label", own.map((row) => `${facets[row.facet].workers} workers: ${scored(row.score)}`).join(", "));
    }
    finish(plot);
  }

  // Legend -------------------------------------------------------------------------------------------------------------------
  function legend(chosen) {
    const place = byId("keys");
    place.replaceChildren();
    const used = [...new Set(chosen.map((row) => row.series))].sort((a, b) => a - b);
    let sync = null;
    for (const index of used) {
      const s = series[index];
      if (used.length > MANY && s.sync !== sync) place.append(html("h4", {}, (sync = s.sync)));
      const sample = svg("svg", { width: 34, height: 12, viewBox: "0 0 34 12", style: `--c:${colour(s)}`, "aria-hidden": "true" });
      sample.append(svg("path", { class: "line", d: "M1 6H33", "stroke-dasharray": DASHES[s.mark % DASHES.length] }), marker(s.mark, 17, 6, 3.6));
      const key = html("button", { class: "key", type: "button", "data-series": index, "aria-pressed": String(state.pinned === index) }, sample);
      key.append(html("span", { class: "no" }, String(s.number)), html("span", { class: "name" }, s.label));
      key.addEventListener("pointerenter", () => highlight(index));
      key.addEventListener("pointerleave", () => highlight(null));
      key.addEventListener("focus", () => highlight(index));
      key.addEventListener("blur", () => highlight(null));
      key.addEventListener("click", () => {
        state.pinned = state.pinned === index ? null : index;
        for (const other of place.querySelectorAll(".key")) other.setAttribute("aria-pressed", String(Number(other.dataset.series) === state.pinned));
        highlight(null);
      });
      place.append(key);
    }
  }

  // Table --------------------------------------------------------------------------------------------------------------------
  let sorted = null; // the column's name, and the direction
  const tableLines = () => [...byId("table").tBodies[0].rows];
  const heads = () => [...byId("table").tHead.rows[0].cells];

  function sortable() {
    heads().forEach((head) => {
      const button = html("button", { type: "button" }, ...head.childNodes);
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const numeric = head.classList.contains("number");
        const first = numeric && head.dataset.name !== "workers" ? "descending" : "ascending";
        const other = first === "descending" ? "ascending" : "descending";
        const direction = head.getAttribute("aria-sort") === first ? other : first;
        sorted = [head.dataset.name, direction];
        sort();
      });
    });
    for (const line of tableLines()) {
      line.addEventListener("pointerenter", () => highlight(rows[line.dataset.row].series));
      line.addEventListener("pointerleave", () => highlight(null));
    }
    sort();
  }
  function sort() {
    const column = sorted ? heads().findIndex((head) => head.dataset.name === sorted[0]) : -1;
    if (column < 0) return;
    for (const each of heads()) each.removeAttribute("aria-sort");
    heads()[column].setAttribute("aria-sort", sorted[1]);
    const numeric = heads()[column].classList.contains("number"), sign = sorted[1] === "ascending" ? 1 : -1;
    const key = (line) => line.cells[column].dataset.v;
    const inOrder = tableLines().sort((a, b) => {
      const [left, right] = [key(a), key(b)];
      if (left === "" || right === "") return (left === "") - (right === ""); // what is not known comes last either way
      return sign * (numeric ? left - right : left.localeCompare(right, "en", { numeric: true }));
    });
    byId("table").tBodies[0].append(...inOrder);
  }
  function filter() {
    byId("table").classList.toggle("one", facets.length > 1 && !state.all); // the heading names the facet
    let shown = 0, possible = 0;
    for (const line of tableLines()) {
      const row = rows[line.dataset.row];
      const inFacet = state.all || row.facet === state.facet;
      line.hidden = !inFacet || !matches(row);
      possible += inFacet;
      shown += !line.hidden;
    }
    const what = possible === 1 ? "row" : "rows";
    byId("shown").textContent = shown === possible ? `${shown} ${what}` : shown ? `${shown} of ${possible} ${what}` : "No row matches.";
    const visible = new Set(rows.filter(matches).map((row) => row.series));
    for (const mark of document.querySelectorAll(".mark, .key")) mark.classList.toggle("out", !visible.has(Number(mark.dataset.series)));
  }
  const matches = (row) => state.words.every((word) => row.text.includes(word));

  // Selectors ----------------------------------------------------------------------------------------------------------------
  const AXES = [["data", "Data set"], ["model", "Model"], ["workers", "Workers"], ["kind", "Kind"], ["study", "Study"], ["cluster", "Cluster"]];

  function selectors() {
    const form = byId("choose");
    form.replaceChildren();
    for (const [axis, title] of AXES) {
      const values = [...new Set(facets.map((f) => f[axis]))];
      if (values.length < 2) continue;
      if (axis === "workers") values.sort((a, b) => a - b);
      const select = html("select", { name: axis });
      for (const value of values) select.append(html("option", { value: String(value) }, axis === "kind" && value === "real" ? "real (measured)" : String(value) || (axis === "cluster" ? "none" : "all")));
      select.addEventListener("change", () => choose(axis, select.value));
      form.append(html("label", {}, title, select));
    }
    form.hidden = !form.childElementCount;
    byId("all-label").hidden = facets.length < 2;
  }
  // Not every combination was run: take the facet that has the value asked for and most else in common.
  function choose(axis, value) {
    const now = facets[state.facet];
    const likeness = (f) => AXES.reduce((sum, [name]) => sum + (f[name] === now[name]), 0);
    const fitting = facets.map((f, i) => [likeness(f), i]).filter(([, i]) => String(facets[i][axis]) === value);
    fitting.sort((a, b) => b[0] - a[0] || a[1] - b[1]);
    state.facet = fitting[0][1];
    state.pinned = null;
    draw();
  }

  // All together -------------------------------------------------------------------------------------------------------------
  function draw() {
    const facet = facets[state.facet];
    for (const [axis] of AXES) {
      const select = byId("choose").elements[axis];
      if (select) select.value = String(facet[axis]);
    }
    for (const block of document.querySelectorAll(".facet")) block.hidden = Number(block.dataset.facet) !== state.facet;
    const chosen = rows.filter((row) => row.facet === state.facet);
    legend(chosen);
    const workersText = `${facet.workers} ${facet.kind} worker${facet.workers === 1 ? "" : "s"}`;
    const [measure, Measure] = facet.by_loss ? ["test loss", "Test loss"] : ["accuracy", "Accuracy"];
    const reversed = facet.by_loss ? " Lower losses are higher up." : "";
    caption("epochs", `${Measure} per epoch`, `${Measure} of the mean model at the end of each epoch, ${workersText}.${reversed}`);
    caption("workers", "Worker counts side by side", `Final ${measure} of each strategy; lines join the same strategy.${reversed}`);
    caption("frontier", `Traffic against ${measure}`, `Up and to the left is better; nothing beats the strategies on the line in both. Bytes ${facet.kind === "virtual" ? "of virtual workers, counted" : "measured"}.`);
    lines("epochs", chosen, EPOCH, { title: "epoch", empty: "No run here recorded an accuracy or a test loss.", at: (p) => `epoch ${p[EPOCH]}: ${scored(p[SCORE])}` });
    byId("loss").hidden = !live;
    if (live) {
      caption("loss", "Training loss per epoch", "Mean over the epoch's mini-batches of all workers.");
      lines("loss", chosen, EPOCH, { of: LOSS, title: "epoch", empty: "No epoch has ended yet.", at: (p) => `epoch ${p[EPOCH]}: training loss ${digits(p[LOSS])}` });
    }
    const timed = chosen.some((row) => row.curve.some((p) => p[SECONDS] !== null));
    if (timed) {
      caption("cost", `${Measure} against seconds`, `Seconds since the start, mean over workers${origin(facet)}.`);
      lines("cost", chosen, SECONDS, { title: inSeconds(facet), empty: "", at: (p) => `epoch ${p[EPOCH]}, ${digits(p[SECONDS])} s: ${scored(p[SCORE])}` });
    } else {
      const why = facet.kind === "virtual" ? "Virtual workers have no clock without --cluster, so there are no seconds to draw" : "No seconds were recorded";
      caption("cost", `${Measure} against traffic`, `${why}; this is ${measure} against MB sent instead.`);
      lines("cost", chosen, MB, { title: "MB sent per worker (log scale)", log: true, empty: "Nothing was sent here.", at: (p) => `epoch ${p[EPOCH]}, ${digits(p[MB])} MB: ${scored(p[SCORE])}` });
    }
    frontier(chosen);
    bars(chosen);
    steps(chosen);
    staleness(chosen);
    workers();
    for (const line of tableLines()) line.dataset.series = rows[line.dataset.row].series;
    filter();
    rest();
  }

  function start() {
    const most = facets.map((_, i) => [rows.filter((row) => row.facet === i && row.ranked).length, i]);
    state.facet = most.sort((a, b) => b[0] - a[0] || a[1] - b[1])[0][1];
    document.documentElement.classList.add("js");
    byId("choose").addEventListener("submit", (event) => event.preventDefault());
    byId("charts").hidden = false;
    byId("table-tools").hidden = false;
    selectors();
    sortable();
    const inputs = [...document.querySelectorAll(".filter-input")];
    for (const input of inputs) {
      input.addEventListener("input", () => {
        for (const other of inputs) other.value = input.value;
        state.words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
        filter();
      });
    }
    byId("all").addEventListener("change", (event) => { state.all = event.target.checked; filter(); });
    let wide = innerWidth;
    new ResizeObserver(() => {
      if (innerWidth === wide) return;
      wide = innerWidth;
      draw();
    }).observe(document.querySelector(".plots"));
    document.addEventListener("scroll", scrolling, { passive: true });
    document.addEventListener("pointerdown", (event) => event.target.closest(".plot svg") || hideTip());
    draw();
  }

  // Newer figures of the same runs: what was chosen, pinned, sorted and focused stays.
  function adopt(data) {
    const named = (f) => AXES.map(([name]) => f[name]).join("\n");
    const [facet, pinned] = [named(facets[state.facet]), state.pinned === null ? null : series[state.pinned].label];
    const mark = document.activeElement?.closest?.(".mark");
    const focused = mark && { figure: mark.closest("figure").id, label: series[mark.dataset.series].label };
    ({ live, facets, series, rows } = data);
    const labels = series.map((s) => s.label);
    state.facet = Math.max(0, facets.findIndex((f) => named(f) === facet));
    state.pinned = labels.includes(pinned) ? labels.indexOf(pinned) : null;
    selectors();
    sortable();
    draw();
    if (focused) document.querySelector(`#${focused.figure} .mark[data-series="${labels.indexOf(focused.label)}"]`)?.focus({ preventScroll: true });
  }
  start();
  document.addEventListener("hocket-data", (event) => adopt(event.detail));
})();
