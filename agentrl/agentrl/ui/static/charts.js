// Draws <figure class="chart"> from the JSON in it (agentrl/ui/charts.py), with ECharts on canvas.
"use strict";

const agentrlCharts = (() => {
  const PALETTES = {
    light: ["#0757ba", "#b04a00", "#116329", "#8250df", "#b3202a", "#00727e", "#59636e", "#7d4e00"],
    dark: ["#6cb1ff", "#f0a35e", "#56d364", "#c9a0ff", "#ff7b72", "#4fd1dc", "#9aa5b1", "#e3b341"],
  };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map(); // by the figure's id: a live page draws into the same picture

  function theme() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    return {
      colors: PALETTES[dark.matches ? "dark" : "light"], ink: color("ink"), faint: color("faint"),
      line: color("line"), ground: color("ground"), raised: color("raised"),
      font: getComputedStyle(document.body).fontFamily, narrow: innerWidth < 640,
    };
  }

  const text = (cell) => cell?.text ?? cell; // of a cell with a link

  const onAxis = (unit) => (value) => figure(value, unit === "%" ? unit : ""); // other units are in the title

  function figure(value, unit) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (unit === "%") return `${+(100 * value).toFixed(1)} %`;
    const size = Math.abs(value);
    const text = size >= 1e6 || (size && size < 1e-3)
      ? value.toPrecision(3).replace(/\.?0+(e|$)/, "$1")
      : value.toLocaleString("en-US", { maximumSignificantDigits: Number.isInteger(value) ? 21 : 4 });
    return unit ? `${text} ${unit}` : text;
  }

  function common(theme) {
    return {
      animation: false, color: theme.colors, backgroundColor: "transparent",
      textStyle: { fontFamily: theme.font, color: theme.ink },
      tooltip: {
        renderMode: "richText", confine: true, backgroundColor: theme.raised,
        borderColor: theme.line, textStyle: { color: theme.ink, fontSize: 12 },
      },
    };
  }

  function axis(theme, more) {
    return {
      axisLine: { lineStyle: { color: theme.line } }, splitLine: { lineStyle: { color: theme.line } },
      axisTick: { show: false }, nameTextStyle: { color: theme.faint },
      axisLabel: { color: theme.faint, hideOverlap: true }, nameLocation: "middle", nameGap: 26, ...more,
    };
  }

  const legend = (theme, names) => ({
    data: names, type: "scroll", top: 0, left: 0, textStyle: { color: theme.ink },
    pageTextStyle: { color: theme.ink }, pageIconColor: theme.ink,
  });

  const spreadText = (spread, unit) =>
    spread ? ` (${figure(spread[0], unit)} to ${figure(spread[1], unit)})` : "";

  // The columns after the first, but for those of spreads: names, places in a row, rows with a spread.
  function curves(chart) {
    const place = (name) => chart.columns.indexOf(name);
    return chart.columns.slice(1).filter((name) => !/, (low|high)$/.test(name)).map((name) => {
      const [low, high] = [place(`${name}, low`), place(`${name}, high`)];
      const spreadOf = (row) => low > 0 && row[low] !== null && row[high] !== null ? [row[low], row[high]] : null;
      return { name, y: place(name), spreadOf, low, high };
    });
  }

  function band(one, rows, color) { // low and high along a curve, as one polygon
    return {
      type: "custom", name: one.name, encode: { x: 0, y: [one.low, one.high] }, silent: true, z: 1, clip: true,
      renderItem: (params, api) => params.dataIndex ? null : {
        type: "polygon", style: { fill: color, opacity: 0.16 },
        shape: { points: [...rows.map((row) => api.coord([row[0], row[one.low]])), ...rows.map((row) => api.coord([row[0], row[one.high]])).reverse()] },
      },
    };
  }

  function errorBars(one, color, horizontal = false, beside = null) {
    return {
      type: "custom", name: one.name, silent: true, z: 3,
      encode: horizontal ? { y: 0, x: [one.low, one.high] } : { x: 0, y: [one.low, one.high] },
      renderItem: (params, api) => {
        const ends = [api.value(one.low), api.value(one.high)];
        if (ends.some(Number.isNaN)) return null;
        const at = (value) => api.coord(horizontal ? [value, api.value(0)] : [api.value(0), value]);
        const shift = beside ? api.barLayout({ count: beside.count, barMaxWidth: 36 })[beside.at].offsetCenter : 0;
        const [a, b] = ends.map(at);
        const stroke = { stroke: color, lineWidth: 1.5, fill: null };
        const line = (x1, y1, x2, y2) => ({
          type: "line", style: stroke,
          shape: horizontal ? { x1, y1: y1 + shift, x2, y2: y2 + shift } : { x1: x1 + shift, y1, x2: x2 + shift, y2 },
        });
        const cap = ([x, y]) => horizontal ? line(x, y - 4, x, y + 4) : line(x - 4, y, x + 4, y);
        return { type: "group", children: [line(...a, ...b), cap(a), cap(b)] };
      },
    };
  }

  // A tooltip's lines: the first cell of a row, then each curve's value in it.
  const rowText = (chart, shown, row, first) => [first, ...shown.filter((one) => row[one.y] !== null)
    .map((one) => `${one.name}: ${figure(row[one.y], chart.unit)}${spreadText(one.spreadOf(row), chart.unit)}`)].join("\n");

  const kinds = {
    lines(chart, theme) {
      const shown = curves(chart), series = [];
      shown.forEach((one, at) => {
        const color = theme.colors[at % theme.colors.length];
        const alone = (chart.dots || []).includes(one.name);
        const symbols = alone || chart.style === "marked" || chart.rows.filter((row) => row[one.y] !== null).length === 1;
        series.push({
          type: "line", name: one.name, encode: { x: 0, y: one.y }, color, showSymbol: symbols, symbol: "circle",
          symbolSize: alone ? 7 : 6, connectNulls: true, z: 2, lineStyle: { width: alone ? 0 : 1.8 },
        });
        const rows = chart.rows.filter(one.spreadOf);
        if (rows.length) series.push(symbols ? errorBars(one, color) : band(one, rows, color));
      });
      const base = common(theme);
      return {
        ...base, legend: legend(theme, shown.map((one) => one.name)), series,
        dataset: { source: chart.rows, sourceHeader: false },
        grid: { left: 12, right: 16, top: 34, bottom: 28, containLabel: true },
        xAxis: axis(theme, { type: "value", name: chart.columns[0], minInterval: 1, min: "dataMin", max: "dataMax", splitLine: { show: false } }),
        yAxis: axis(theme, {
          type: chart.log ? "log" : "value", scale: true, axisLabel: { color: theme.faint, formatter: onAxis(chart.unit) },
        }),
        tooltip: {
          ...base.tooltip, trigger: "axis",
          formatter: ([one]) => one ? rowText(chart, shown, one.value, `${chart.columns[0]} ${figure(one.value[0], "")}`) : "",
        },
      };
    },

    bars(chart, theme) {
      const shown = curves(chart), across = chart.horizontal, base = common(theme);
      const bars = shown.map((one) => ({
        type: "bar", name: one.name, barMaxWidth: 36, encode: across ? { y: 0, x: one.y } : { x: 0, y: one.y },
      }));
      const spreads = shown.filter((one) => one.low > 0)
        .map((one, at) => errorBars(one, theme.ink, across, { count: shown.length, at }));
      const names = axis(theme, { type: "category", inverse: across, splitLine: { show: false },
        axisLabel: { color: theme.faint, overflow: "truncate", interval: across || chart.rows.length < 8 ? 0 : "auto",
          width: across ? (theme.narrow ? 100 : 190) : Math.max(40, (theme.narrow ? 280 : 480) / chart.rows.length) } });
      const values = axis(theme, { type: "value", axisLabel: { color: theme.faint, hideOverlap: true, formatter: onAxis(chart.unit) } });
      return {
        ...base, legend: { ...legend(theme, shown.map((one) => one.name)), show: shown.length > 1 }, series: [...bars, ...spreads],
        dataset: { source: chart.rows, sourceHeader: false },
        grid: { left: 12, right: across ? 28 : 16, top: shown.length > 1 ? 34 : 14, bottom: 10, containLabel: true },
        xAxis: across ? values : names, yAxis: across ? names : values,
        tooltip: {
          ...base.tooltip, trigger: "axis", axisPointer: { type: "shadow" },
          formatter: ([one]) => rowText(chart, shown, one.value, one.value[0]),
        },
      };
    },

    flow(chart, theme) {
      const base = common(theme), narrow = theme.narrow;
      const links = chart.rows.filter(([, , amount]) => amount).map(([from, to, value]) => ({ source: text(from), target: text(to), value }));
      const nodes = [...new Set(chart.rows.flatMap(([from, to]) => [text(from), text(to)]))];
      return {
        ...base,
        tooltip: { ...base.tooltip, formatter: (one) => one.dataType === "edge"
          ? `${one.data.source} → ${one.data.target}: ${figure(one.value, chart.unit)}` : `${one.name}: ${figure(one.value, chart.unit)}` },
        series: [{
          type: "sankey", left: 4, right: narrow ? 120 : 190, top: 10, bottom: 10, nodeWidth: 14, nodeGap: 12, draggable: false,
          layoutIterations: 0, nodeAlign: "left", links,
          data: nodes.map((name, at) => ({ name, itemStyle: { color: theme.colors[at % theme.colors.length] } })),
          lineStyle: { color: "target", opacity: 0.3, curveness: 0.5 }, emphasis: { focus: "adjacency" },
          label: { color: theme.ink, textBorderWidth: 0, formatter: (one) => `${one.name}  ${figure(one.value, "")}`, width: narrow ? 110 : 180, overflow: "break" },
        }],
      };
    },

    timeline(chart, theme) {
      const base = common(theme), lanes = [...new Set(chart.rows.map(([lane]) => lane))];
      return {
        ...base, grid: { left: 12, right: 16, top: 8, bottom: 28, containLabel: true },
        xAxis: axis(theme, { type: "value", name: "seconds", min: 0, max: Math.ceil(Math.max(...chart.rows.map((row) => row[2] + row[3]))) }),
        yAxis: axis(theme, { type: "category", data: lanes, inverse: true, splitLine: { show: false } }),
        tooltip: { ...base.tooltip, formatter: (one) => {
          const [lane, label, start, took] = chart.rows[one.dataIndex];
          return `${lane} · ${label}\n${figure(took, "s")}, from ${figure(start, "s")}`;
        } },
        series: [{
          type: "custom", clip: true, encode: { x: [1, 2], y: 0 },
          data: chart.rows.map(([lane, , start, took]) => [lanes.indexOf(lane), start, start + took]),
          renderItem: (params, api) => {
            const [x1, y] = api.coord([api.value(1), api.value(0)]);
            const [x2] = api.coord([api.value(2), api.value(0)]);
            const height = Math.min(api.size([0, 1])[1] * 0.7, 26);
            return { type: "rect", shape: { x: x1, y: y - height / 2, width: Math.max(x2 - x1, 1), height },
              style: { fill: theme.colors[api.value(0) % theme.colors.length], stroke: theme.ground, lineWidth: 0.5 } };
          },
        }],
      };
    },
  };

  // ---- pictures in the page

  function draw() {
    for (const figure of document.querySelectorAll("figure.chart")) {
      if (figure.querySelector(".canvas")) continue;
      const source = figure.querySelector("script[type='application/json']");
      const data = JSON.parse(source.textContent);
      if (!kinds[data.kind]) continue;
      let known = drawn.get(figure.id);
      if (!known) drawn.set(figure.id, known = begin(data));
      source.after(known.canvas, known.tools); // moved, not made again: no flicker
      known.data = data;
      paint(known);
    }
    for (const [id, known] of drawn) {
      if (!known.canvas.isConnected) { known.resizes.disconnect(); known.chart.dispose(); drawn.delete(id); }
    }
  }

  function begin(data) {
    const canvas = document.createElement("div");
    canvas.className = "canvas";
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    const tools = document.createElement("div");
    tools.className = "tools";
    const known = { canvas, tools, data, chart: null, at: -1 };
    for (const kind of ["PNG", "SVG"]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = kind;
      button.setAttribute("aria-label", `Save ${data.title} as ${kind}`);
      button.addEventListener("click", () => save(known.data, kind, canvas));
      tools.append(button);
    }
    canvas.addEventListener("keydown", (event) => step(known, event));
    known.resizes = new ResizeObserver(() => known.chart && known.chart.resize());
    known.resizes.observe(canvas);
    return known;
  }

  function paint(known) {
    if (!known.chart) {
      known.chart = echarts.init(known.canvas, null, { renderer: "canvas" });
      known.chart.getZr().on("click", (event) => clicked(known, event));
      known.chart.on("click", (event) => follow(known.data, event));
    }
    known.canvas.setAttribute("aria-label", `${known.data.title}. Arrow keys step through its figures, which are also in the table below.`);
    known.chart.setOption(kinds[known.data.kind](known.data, theme()), { notMerge: true });
    known.chart.resize();
  }

  function clicked(known, event) { // a click beside a curve means the nearest x
    const { data, chart } = known;
    if (data.kind !== "lines" || !data.href || !chart.containPixel("grid", [event.offsetX, event.offsetY])) return;
    const x = chart.convertFromPixel({ xAxisIndex: 0 }, event.offsetX);
    const nearest = data.rows.map((row) => row[0]).reduce((best, one) => Math.abs(one - x) < Math.abs(best - x) ? one : best);
    location.assign(data.href.replace("{x}", nearest));
  }

  function follow(data, event) { // a node of a flow, or a link to it
    const name = event.dataType === "edge" ? event.data.target : event.name;
    const cell = data.kind === "flow" && data.rows.flat().find((one) => one.href && one.text === name);
    if (cell) location.assign(cell.href);
  }

  function step(known, event) {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const { chart, data } = known;
    if (event.key === "Escape") chart.dispatchAction({ type: "hideTip" });
    if (!(event.key in moves)) return;
    event.preventDefault();
    const many = chart.getModel().getSeriesByIndex(0).getData().count();
    known.at = Math.min(Math.max(known.at + moves[event.key], 0), many - 1);
    const place = data.kind === "lines" // the first curve may have no value there
      ? { x: chart.convertToPixel({ xAxisIndex: 0 }, data.rows[known.at][0]), y: chart.getHeight() / 2 }
      : { seriesIndex: 0, dataIndex: known.at };
    chart.dispatchAction({ type: "showTip", ...place });
  }

  function save(data, kind, canvas) {
    const look = theme();
    const size = { width: Math.max(canvas.clientWidth, 640), height: canvas.clientHeight + 30 };
    const option = kinds[data.kind](data, look);
    const title = { text: data.unit && data.unit !== "%" ? `${data.title} (${data.unit})` : data.title, left: 8, top: 4, textStyle: { color: look.ink, fontSize: 14, fontFamily: look.font } };
    const grid = option.grid && { ...option.grid, top: option.grid.top + 30 };
    const lower = (part) => part && { ...part, top: (part.top || 0) + 30 };
    const series = data.kind === "flow" ? option.series.map(lower) : option.series;
    const whole = { ...option, title, series, backgroundColor: look.ground, ...(grid && { grid }), ...(option.legend && { legend: lower(option.legend) }) };
    const svg = kind === "SVG";
    const chart = svg ? echarts.init(null, null, { renderer: "svg", ssr: true, ...size })
      : echarts.init(document.createElement("div"), null, { renderer: "canvas", devicePixelRatio: 2, ...size });
    chart.setOption(whole);
    const link = document.createElement("a");
    link.href = svg ? URL.createObjectURL(new Blob([chart.renderToSVGString()], { type: "image/svg+xml" })) : chart.getDataURL({ type: "png" });
    link.download = `${data.title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}.${kind.toLowerCase()}`;
    link.click();
    chart.dispose();
  }

  dark.addEventListener("change", () => drawn.forEach(paint));
  document.addEventListener("DOMContentLoaded", draw);
  document.addEventListener("htmx:afterSwap", draw);
  return { kinds, draw, figure, common, axis, legend };
})();
window.agentrlCharts = agentrlCharts;
