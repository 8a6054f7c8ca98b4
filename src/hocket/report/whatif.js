(() => {
  "use strict";
  const source = document.getElementById("what-if-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const unit = (value, units) => {
    const [name, scale] = units.find(([, scale]) => value >= scale * 0.9999) || units[units.length - 1];
    return `${+(value / scale).toPrecision(3)} ${name}`;
  };
  const shown = {
    bits: (v) => unit(v, [["Gbit/s", 1e9], ["Mbit/s", 1e6]]),
    latency_s: (v) => unit(v, [["ms", 1e-3], ["µs", 1e-6]]),
    workers: (v) => String(v),
  };
  const cell = (tag, text) => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (tag === "td") made.className = "number";
    return made;
  };
  for (const block of document.querySelectorAll(".what-if")) {
    const own = data[block.dataset.block];
    const sliders = [...block.querySelectorAll("input[type=range]")];
    const body = block.querySelector(".what-if-table tbody");
    const update = () => {
      const at = {};
      for (const slider of sliders) {
        const axis = slider.dataset.axis;
        at[axis] = Number(slider.value);
        const text = shown[axis](own[axis][at[axis]]);
        block.querySelector(`output[for="${slider.id}"]`).textContent = text;
        slider.setAttribute("aria-valuetext", text);
      }
      const place = (at.workers * own.latency_s.length + at.latency_s) * own.bits.length + at.bits;
      const workers = own.workers[at.workers];
      const lines = own.strategies.map((name, k) => [name, ...own.table[place][k]]);
      lines.sort((a, b) => (a[1] ?? Infinity) - (b[1] ?? Infinity));
      body.replaceChildren(...lines.map(([name, ms, efficiency]) => {
        const line = document.createElement("tr");
        const head = cell("th", name);
        head.scope = "row";
        const share = cell("td", "");
        share.className = "";
        if (efficiency !== null) {
          const bar = document.createElement("span");
          bar.className = "bar";
          bar.style.width = `${Math.max(1, Math.min(100, efficiency)) * 1.2}px`;
          share.append(bar, `${Math.round(efficiency)} %`);
        }
        const speed = ms ? String(+((1000 * workers * own.batch) / ms).toPrecision(3)) : "–";
        line.append(head, cell("td", ms === null ? "–" : String(+ms.toPrecision(3))), cell("td", speed), share);
        return line;
      }));
    };
    for (const slider of sliders) slider.addEventListener("input", update);
    block.querySelector(".sliders").hidden = false;
    update();
  }
})();
