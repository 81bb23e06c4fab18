// Draws the curves of the report. The data is JSON in the page, plotly.js lies in it compressed. Only a page of `report --serve` asks for more: its own server.
"use strict";
(async () => {
  const root = document.documentElement;
  const at = (id) => document.getElementById(id);
  const coarse = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page, unless it is to zoom
  let page, several, unit, perUnit, plots;
  // What is shown: hidden runs, hidden curves by name, the zoom on x (in its units) and, by name of the figure, on y.
  const state = { axis: "step", logx: false, logy: false, smooth: 0, runs: new Set(), curves: new Set(), x: null, y: {}, drag: !coarse };
  const DASHES = ["solid", "dash", "dot"];
  const FORMATS = { number: ".5~g", percent: ".1%", gib: ".4~g", seconds: ".4~g" };
  const UNITS = { gib: " GiB", seconds: " s" };

  async function unpack() {
    const packed = Uint8Array.from(atob(at("plotly").textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    if (!window.Plotly) throw new Error("plotly.js did not start");
  }

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;"); // plotly reads tags in names
  const coloured = (figure, curve) => {
    const bases = new Set(figure.curves.map((one) => one.base)).size;
    return several ? curve.run : bases === 1 && curve.heldOut ? 1 : curve.base;
  };
  const shown = (number, index) => {
    const curve = page.figures[number].curves[index];
    return !state.runs.has(curve.run) && !state.curves.has(named(page.figures[number], curve));
  };
  const named = (figure, curve) => JSON.stringify([figure.group, figure.title, ...(curve ? [curve.run, curve.label] : [])]);

  // Takes the curves of a document: of this one, or of a newer one.
  function take(from) {
    page = JSON.parse(from.getElementById("data").textContent);
    several = page.runs.length > 1;
    for (const one of page.figures.flatMap((figure) => figure.curves))
      Object.assign(one, { least: Math.min(...one.y), leastAbove0: Math.min(...one.y.filter((y) => y > 0)), most: Math.max(...one.y) });
    // Seconds are drawn in the unit that fits the longest run.
    const longest = Math.max(0, ...page.xs.map((one) => (one.seconds ? one.seconds[one.seconds.length - 1] : 0))), before = perUnit;
    [unit, perUnit] = longest > 7200 ? ["h", 3600] : longest > 180 ? ["min", 60] : ["s", 1];
    if (!(state.axis in page.axes)) [state.axis, state.x] = ["step", null]; // another run has begun here
    if (state.axis === "seconds" && state.x) state.x = state.x.map((one) => (one * before) / perUnit);
    if (state.x && page.xs.every((one, x) => places({ x }).at(-1) <= state.x[0])) state.x = null; // it has begun anew
  }
  const places = (curve) => {
    const x = page.xs[curve.x][state.axis];
    return state.axis === "seconds" ? x.map((one) => one / perUnit) : x;
  };
  const axisTitle = () => ({ step: "step", tokens: "tokens", seconds: `time (${unit})` })[state.axis];

  // An average over the last points, the sooner forgetting the smaller `share`; at the start over those that are there.
  function smoothed(y, share) {
    let sum = 0, weight = 0;
    return y.map((one) => ((sum = sum * share + one), (weight = weight * share + 1), sum / weight));
  }

  function traces(number) {
    const figure = page.figures[number], made = [];
    figure.curves.forEach((curve, index) => {
      if (!shown(number, index)) return;
      const hue = colour(`--run${coloured(figure, curve) % 8}`), x = places(curve);
      const few = curve.y.length < 3, share = curve.heldOut || !figure.noisy ? 0 : state.smooth;
      const dash = several ? DASHES[(curve.base + (curve.run > 7 ? 1 : 0)) % 3] : "solid";
      const name = plain(several ? `${page.runs[curve.run]}${figure.curves.some((one) => one.label !== curve.label) ? " · " + curve.label : ""}` : curve.label);
      const line = { color: hue, width: curve.heldOut ? 1.5 : 1.75, dash: curve.heldOut ? "dot" : dash, simplify: false };
      const value = `%{y:${FORMATS[figure.kind] || ".5~g"}}${UNITS[figure.kind] || ""}`;
      const marker = { color: hue, size: curve.heldOut ? 6 : 5, line: { color: colour("--panel"), width: 1 } };
      const mode = curve.heldOut || few ? "lines+markers" : "lines";
      const raw = isLog(number) ? curve.y.map((one) => (one > 0 ? one : null)) : curve.y;
      const common = { type: "scatter", x, name, mode, marker, showlegend: false, meta: index };
      if (share) {
        made.push({ ...common, y: raw, line: { ...line, width: 1 }, opacity: 0.28, hoverinfo: "skip" });
        const own = value.replace("%{y", "%{customdata");
        made.push({ ...common, y: smoothed(curve.y, share), customdata: curve.y, line, hovertemplate: `${own} (smoothed ${value})` });
      } else made.push({ ...common, y: raw, line, hovertemplate: value });
    });
    return made;
  }

  const logOf = (one) => Math.log10(one);
  const ranged = (range, log) => (range && log ? (range[0] > 0 ? range.map(logOf) : null) : range);

  // A figure with negative values stays linear; zeros are gaps on a logarithmic axis.
  const isLog = (number) => state.logy && page.figures[number].curves.every((one) => one.least >= 0) && page.figures[number].curves.some((one) => one.most > 0);
  const decades = (figure) => Math.max(...figure.curves.map((one) => one.most)) / Math.min(...figure.curves.map((one) => one.leastAbove0));

  // The height of what is seen between the two ends of a zoom on x.
  function heightWithin(made, log) {
    let low = Infinity, high = -Infinity;
    for (const one of made) {
      for (let i = 0; i < one.x.length; i++) {
        if (one.x[i] < state.x[0] || one.x[i] > state.x[1] || one.y[i] === null) continue;
        if (one.y[i] < low) low = one.y[i];
        if (one.y[i] > high) high = one.y[i];
      }
    }
    if (low > high) return null;
    if (log) [low, high] = [logOf(low), logOf(high)];
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.06 || 1;
    return [low - margin, high + margin];
  }

  function layout(number, made) {
    const figure = page.figures[number], log = isLog(number), soft = colour("--soft"), line = colour("--line");
    const x = ranged(state.x, state.logx), font = { family: getComputedStyle(document.body).fontFamily, size: 12, color: soft };
    const axis = { gridcolor: line, linecolor: line, zeroline: false, tickfont: font, automargin: true, fixedrange: false };
    const y = state.y[named(figure)] || (x && heightWithin(made, log));
    const kind = figure.kind === "percent" ? { tickformat: ".3~p" } : { ticksuffix: UNITS[figure.kind] || "" };
    if (log) Object.assign(kind, { tickformat: figure.kind === "percent" ? ".3~p" : ",~g", dtick: decades(figure) < 3000 ? "D2" : undefined });
    const positive = figure.curves.every((one) => one.least >= 0);
    return {
      autosize: true,
      margin: { l: 8, r: 10, t: 6, b: 34 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font,
      hovermode: "x unified",
      hoverdistance: 40,
      hoverlabel: { bgcolor: colour("--panel"), bordercolor: line, font: { ...font, color: colour("--ink") }, align: "left" },
      dragmode: state.drag ? "zoom" : false,
      separators: ".,",
      xaxis: {
        ...axis, showgrid: false, ticks: "outside", ticklen: 4, tickcolor: line, type: state.logx ? "log" : "linear", nticks: 7,
        tickformat: state.axis === "tokens" ? "~s" : ",~g", hoverformat: state.axis === "seconds" ? ".4~g" : ",d",
        title: { text: axisTitle(), font, standoff: 6 }, spikecolor: soft, spikethickness: 1, spikedash: "solid",
        unifiedhovertitle: { text: state.axis === "seconds" ? `%{x} ${unit}` : `${axisTitle()} %{x}` },
        ...(x ? { range: x, autorange: false } : { autorange: true }),
      },
      yaxis: { ...axis, type: log ? "log" : "linear", nticks: 6, exponentformat: "power", minexponent: 7, rangemode: positive ? "nonnegative" : "normal", ...kind, ...(y ? { range: y, autorange: false } : { autorange: true }) },
    };
  }

  const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false, showTips: false, scrollZoom: false };
  const drawn = new Set();

  async function draw(number) {
    const plot = plots[number], made = traces(number);
    await Plotly.react(plot, made, layout(number, made), CONFIG);
    if (drawn.has(number)) return;
    drawn.add(number);
    plot.on("plotly_relayout", (change) => zoomed(number, change));
    plot.on("plotly_doubleclick", whole);
  }

  // All figures anew, those on the screen first; a newer call ends an older one.
  let turn = 0;
  async function refresh() {
    const mine = ++turn;
    delete root.dataset.drawn;
    const seen = (plot) => plot.getBoundingClientRect().bottom > 0 && plot.getBoundingClientRect().top < innerHeight;
    const order = plots.map((plot, number) => number).sort((a, b) => seen(plots[b]) - seen(plots[a]));
    for (const number of order) {
      await draw(number);
      await new Promise((go) => setTimeout(go));
      if (mine !== turn) return;
    }
    if (at("reset")) at("reset").disabled = !state.x && !Object.keys(state.y).length;
    root.dataset.drawn = turn;
  }

  // A zoom on x is that of all figures; one on y is a figure's own.
  function zoomed(number, change) {
    const x = change["xaxis.range[0]"] !== undefined ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : change["xaxis.range"];
    const y = change["yaxis.range[0]"] !== undefined ? [change["yaxis.range[0]"], change["yaxis.range[1]"]] : change["yaxis.range"];
    if (!x && !y) return;
    if (x) state.x = state.logx ? x.map((one) => 10 ** one) : x;
    if (y) state.y[named(page.figures[number])] = y;
    refresh();
  }
  function whole() {
    state.x = null;
    state.y = {};
    refresh();
  }

  function button(text, pressed, press, number) {
    const made = document.createElement("button");
    made.type = "button";
    made.setAttribute("aria-pressed", pressed);
    if (number !== undefined) {
      const swatch = made.appendChild(document.createElement("span"));
      swatch.className = `swatch run${number % 8}${number > 7 ? " again" : ""}`;
      swatch.setAttribute("aria-hidden", "true");
    }
    made.append(text);
    made.addEventListener("click", () => press(made));
    return made;
  }
  function toggle(set, key, made) {
    set.has(key) ? set.delete(key) : set.add(key);
    made.setAttribute("aria-pressed", !set.has(key));
    refresh();
  }

  function tools() {
    plots = page.figures.map((_, number) => at(`plot${number}`));
    drawn.clear();
    if (!plots.length) return; // no step yet
    for (const [axis, title] of Object.entries(page.axes)) {
      at("axes").append(button(title, axis === state.axis, (made) => {
        for (const one of at("axes").children) one.setAttribute("aria-pressed", one === made);
        state.axis = axis;
        whole();
      }));
    }
    if (several) page.runs.forEach((name, run) => at("runs").append(button(name, !state.runs.has(run), (made) => toggle(state.runs, run, made), run)));
    page.figures.forEach((figure, number) => {
      const labels = figure.curves.map((one) => (one.heldOut ? "held out" : one.label)), said = [...new Set(labels)].sort((a, b) => (a === "held out") - (b === "held out"));
      const bases = new Set(figure.curves.map((one) => one.base)).size;
      if (said.length < 2) return;
      said.forEach((label) => {
        const mine = figure.curves.map((one, index) => index).filter((index) => labels[index] === label);
        const press = (made) => mine.forEach((index) => toggle(state.curves, named(figure, figure.curves[index]), made));
        const first = figure.curves[mine[0]], grey = several || (first.heldOut && bases > 1);
        const made = button(label, mine.some((index) => !state.curves.has(named(figure, figure.curves[index]))), press, grey ? -1 : coloured(figure, first));
        if (first.heldOut || (several && first.base)) made.classList.add(first.heldOut ? "heldout" : "dashed");
        at(`legend${number}`).append(made);
      });
    });
    [at("logx").checked, at("logy").checked, at("smooth").value, at("smoothed").textContent] = [state.logx, state.logy, state.smooth, state.smooth];
    const listen = (id, event, take) => at(id).addEventListener(event, (found) => (take(found.target), refresh()));
    listen("logx", "change", (box) => ((state.logx = box.checked), (state.x = null)));
    listen("logy", "change", (box) => ((state.logy = box.checked), (state.y = {})));
    listen("smooth", "input", (slide) => ((state.smooth = +slide.value), (at("smoothed").textContent = slide.value)));
    at("reset").addEventListener("click", whole);
    if (coarse) {
      at("reset").before(button("drag to zoom", state.drag, (made) => {
        made.setAttribute("aria-pressed", (state.drag = !state.drag));
        refresh();
      }));
      at("reset").previousSibling.className = "quiet";
    }
    plots.forEach((plot, number) => plot.addEventListener("keydown", (event) => key(event, number)));
    at("tools").hidden = false;
  }

  // Reading and zooming a figure with the keyboard.
  const read = {};
  function key(event, number) {
    const plot = plots[number], traced = plot.data || [];
    const best = traced.reduce((found, one, index) => (one.hoverinfo !== "skip" && (found < 0 || one.x.length > traced[found].x.length) ? index : found), -1);
    if (best < 0) return;
    const x = traced[best].x, last = x.length - 1, far = event.shiftKey ? Math.max(1, Math.round(x.length / 20)) : 1;
    const inside = state.x ? [x.findIndex((one) => one >= state.x[0]), x.findLastIndex((one) => one <= state.x[1])] : [0, last];
    const from = Math.min(Math.max(read[number] ?? inside[0] - 1, inside[0] - 1), inside[1] + 1);
    if (Math.min(...inside) < 0 && event.key !== "0" && event.key !== "Escape") return; // no point is in the zoom
    const moves = { ArrowRight: from + far, ArrowLeft: from - far, Home: inside[0], End: inside[1] };
    if (event.key in moves) {
      const place = (read[number] = Math.min(Math.max(moves[event.key], inside[0]), inside[1]));
      Plotly.Fx.hover(plot, [{ curveNumber: best, pointNumber: place }]);
      const figure = page.figures[number], one = figure.curves[traced[best].meta];
      at("reading").textContent = `${axisTitle()} ${+x[place].toPrecision(6)}: ${one.label} ${+one.y[place].toPrecision(5)}${UNITS[figure.kind] || ""}`;
    } else if (event.key === "+" || event.key === "-") {
      const [low, high] = state.x || [x[0], x[last]], middle = x[Math.max(read[number] ?? 0, 0)];
      const centre = middle >= low && middle <= high && read[number] !== undefined ? middle : (low + high) / 2;
      const wide = (high - low) * (event.key === "+" ? 0.25 : 1);
      state.x = [Math.max(Math.min(centre, x[last] - wide) - wide, x[0]), Math.min(Math.max(centre, x[0] + wide) + wide, x[last])];
      refresh();
    } else if (event.key === "0" || event.key === "Escape") whole();
    else return;
    event.preventDefault();
  }

  function theme() {
    const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    const name = () => (at("theme").textContent = dark() ? "Light" : "Dark");
    at("theme").addEventListener("click", () => ((root.dataset.theme = dark() ? "light" : "dark"), name(), refresh()));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (name(), refresh()));
    at("theme").hidden = false;
    name();
  }

  function printing() {
    let before;
    addEventListener("beforeprint", () => {
      before = root.dataset.theme;
      root.dataset.theme = "light";
      for (const one of document.querySelectorAll("details")) one.open = true;
      plots.forEach((plot, number) => drawn.has(number) && Plotly.react(plot, traces(number), { ...layout(number, traces(number)), autosize: false, width: 640, height: 260 }, CONFIG));
    });
    addEventListener("afterprint", () => {
      before === undefined ? delete root.dataset.theme : (root.dataset.theme = before);
      refresh();
    });
  }

  // Turns the page into a newer one. What is alike, opened by the reader or drawn by this script stays.
  function renew(old, fresh) {
    if (old.isEqualNode(fresh) || old.matches?.(".plot, .legend, #tools, #reading, #undrawn, noscript")) return;
    const theirs = [...fresh.childNodes], alike = old.nodeName === fresh.nodeName && old.className === fresh.className && old.childNodes.length === theirs.length;
    alike && theirs.length ? theirs.forEach((one, index) => renew(old.childNodes[index], one)) : old.replaceWith(fresh);
  }

  // Asks for a newer page, and says how far the run is: to a screen reader once a minute.
  async function follow() {
    const shape = () => JSON.stringify([page.axes, page.figures.map((figure) => figure.curves.map((curve) => named(figure, curve)))]);
    for (let tag = "", pause = 2000, spoken = 0; ; await new Promise((go) => setTimeout(go, pause))) {
      if (document.hidden || document.querySelector(".plot:active")) continue; // nobody looks, or a zoom is being drawn
      const [answer, text] = await fetch("now", { headers: { "If-None-Match": tag }, signal: AbortSignal.timeout(120000) }).then(async (got) => [got, await got.text()]).catch(() => [{}]);
      if (answer.status === 304) continue;
      if (answer.ok) {
        const before = shape(), fresh = new DOMParser().parseFromString(text, "text/html");
        take(fresh);
        // Figures are replaced as a whole; the window would keep those that are not purged.
        if (shape() !== before) plots.forEach((plot) => Plotly.purge(plot)), (at("figures").className = "older");
        renew(at("main"), fresh.getElementById("main"));
        if (shape() !== before) tools();
        await refresh();
      }
      const over = !document.querySelector(".status.running, .status.stalled"), step = Math.max(0, ...page.xs.map((one) => one.step[one.step.length - 1]));
      const news = over ? `over, step ${step}; goes on if it is resumed` : step ? `live, step ${step}` : "live, no step yet";
      at("live").textContent = answer.ok ? news : "not updated: packtrain report has ended, or cannot read the run";
      if (Date.now() - spoken > 60000) [at("spoken").textContent, spoken] = [`updated: ${at("live").textContent}`, Date.now()];
      [tag, pause] = [answer.ok ? answer.headers.get("ETag") : "", answer.ok && !over ? 2000 : 10000];
    }
  }

  try {
    take(document);
    await unpack();
    tools();
    theme();
    printing();
    await refresh();
    if (at("live")) await follow();
  } catch (error) {
    at("undrawn").hidden = false;
    at("undrawn").textContent = `The curves could not be drawn (${error.message}); the table below has their figures. Browsers since 2023 can.`;
    console.error(error);
  }
})();
