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

  function band(one, color) { // low and high along a curve, as one polygon
    const rows = one.points.map((point, at) => [point[0], ...(one.spread[at] || [])]).filter((row) => row.length > 1);
    return {
      type: "custom", name: one.name, data: rows, encode: { x: 0, y: [1, 2] }, silent: true, z: 1, clip: true,
      renderItem: (params, api) => params.dataIndex ? null : {
        type: "polygon", style: { fill: color, opacity: 0.16 },
        shape: { points: [...rows.map((row) => api.coord([row[0], row[1]])), ...rows.map((row) => api.coord([row[0], row[2]])).reverse()] },
      },
    };
  }

  function errorBars(name, rows, color, horizontal = false, place = null) { // rows: [x, low, high]
    return {
      type: "custom", name, data: rows, silent: true, z: 3,
      encode: horizontal ? { y: 0, x: [1, 2] } : { x: 0, y: [1, 2] },
      renderItem: (params, api) => {
        const at = (value) => api.coord(horizontal ? [value, api.value(0)] : [api.value(0), value]);
        const shift = place ? api.barLayout({ count: place.count, barMaxWidth: 36 })[place.at].offsetCenter : 0;
        const [a, b] = [at(api.value(1)), at(api.value(2))];
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

  const kinds = {
    lines(chart, theme) {
      const series = [];
      chart.series.forEach((one, at) => {
        const color = theme.colors[at % theme.colors.length];
        const alone = one.style === "dots";
        const symbols = alone || one.style === "marked" || one.points.length === 1;
        series.push({
          type: "line", name: one.name, data: one.points, color, showSymbol: symbols, symbol: "circle",
          symbolSize: alone ? 7 : 6, connectNulls: true, z: 2,
          lineStyle: { width: alone ? 0 : 1.8, type: one.style === "dashed" ? "dashed" : "solid" },
        });
        if (!one.spread) return;
        const rows = one.points.map((point, i) => [point[0], ...(one.spread[i] || [])]).filter((row) => row.length > 1);
        series.push(symbols ? errorBars(one.name, rows, color) : band(one, color));
      });
      const spreads = Object.fromEntries(chart.series.map((one) =>
        [one.name, new Map(one.points.map((point, at) => [point[0], one.spread && one.spread[at]]))]));
      const names = chart.series.map((one) => one.name);
      const base = common(theme);
      return {
        ...base, legend: legend(theme, names), series,
        grid: { left: 12, right: 16, top: chart.y ? 48 : 34, bottom: 28, containLabel: true },
        xAxis: axis(theme, { type: "value", name: chart.x, minInterval: 1, min: "dataMin", max: "dataMax", splitLine: { show: false } }),
        yAxis: axis(theme, {
          type: chart.log ? "log" : "value", name: chart.y, nameLocation: "end", nameGap: 8, scale: true, show: true,
          axisLabel: { color: theme.faint, formatter: onAxis(chart.unit) },
        }),
        tooltip: {
          ...base.tooltip, trigger: "axis",
          formatter: (params) => {
            const seen = params.filter((one) => one.seriesType === "line");
            if (!seen.length) return "";
            const x = seen[0].value[0];
            return [`${chart.x} ${figure(x, "")}`, ...seen.map((one) =>
              `${one.seriesName}: ${figure(one.value[1], chart.unit)}${spreadText(spreads[one.seriesName].get(one.value[0]), chart.unit)}`)].join("\n");
          },
        },
      };
    },

    bars(chart, theme) {
      const count = chart.stacked ? 1 : chart.series.length;
      const series = chart.series.map((one) => ({
        type: "bar", name: one.name, data: one.values, stack: chart.stacked ? "all" : undefined, barMaxWidth: 36,
        cursor: chart.hrefs.length ? "pointer" : "default",
      }));
      chart.series.forEach((one, at) => {
        const rows = (one.spread || []).map((pair, i) => pair && [i, ...pair]).filter(Boolean);
        if (rows.length) series.push(errorBars(one.name, rows, theme.ink, chart.horizontal, { count, at }));
      });
      const names = axis(theme, { type: "category", data: chart.names, inverse: chart.horizontal, splitLine: { show: false },
        axisLabel: { color: theme.faint, overflow: "truncate", interval: chart.horizontal || chart.names.length < 8 ? 0 : "auto",
          width: chart.horizontal ? (theme.narrow ? 100 : 190) : Math.max(40, (theme.narrow ? 280 : 480) / chart.names.length) } });
      const values = axis(theme, { type: "value", axisLabel: { color: theme.faint, hideOverlap: true, formatter: onAxis(chart.unit) } });
      const base = common(theme);
      return {
        ...base, legend: { ...legend(theme, chart.series.map((one) => one.name)), show: chart.series.length > 1 }, series,
        grid: { left: 12, right: 16, top: chart.series.length > 1 ? 34 : 14, bottom: 10, containLabel: true },
        xAxis: chart.horizontal ? values : names, yAxis: chart.horizontal ? names : values,
        tooltip: {
          ...base.tooltip, trigger: "axis", axisPointer: { type: "shadow" },
          formatter: (params) => {
            const seen = params.filter((one) => one.seriesType === "bar");
            return [chart.names[seen[0].dataIndex], ...seen.map((one) =>
              `${one.seriesName}: ${figure(one.value, chart.unit)}${spreadText((chart.series[one.seriesIndex].spread || [])[one.dataIndex], chart.unit)}`)].join("\n");
          },
        },
      };
    },

    flow(chart, theme) {
      const base = common(theme);
      return {
        ...base,
        tooltip: { ...base.tooltip, formatter: (one) => one.dataType === "edge"
          ? `${one.data.source} → ${one.data.target}: ${figure(one.value, chart.unit)}` : `${one.name}: ${figure(one.value, chart.unit)}` },
        series: [{
          type: "sankey", left: 4, right: theme.narrow ? 120 : 190, top: 10, bottom: 10, nodeWidth: 14, nodeGap: 12, draggable: false,
          layoutIterations: 0, nodeAlign: "left",
          data: chart.nodes.map((node, at) => ({ name: node.name, href: node.href, itemStyle: { color: theme.colors[at % theme.colors.length] } })),
          links: chart.links, lineStyle: { color: "target", opacity: 0.3, curveness: 0.5 }, emphasis: { focus: "adjacency" },
          label: { color: theme.ink, textBorderWidth: 0, formatter: (one) => `${one.name}  ${figure(one.value, "")}`, width: theme.narrow ? 110 : 180, overflow: "break" },
        }],
      };
    },

    timeline(chart, theme) {
      const base = common(theme);
      return {
        ...base, grid: { left: 12, right: 16, top: 8, bottom: 28, containLabel: true },
        xAxis: axis(theme, { type: "value", name: "seconds", min: 0, max: Math.ceil(Math.max(...chart.spans.map((span) => span[2]))) }),
        yAxis: axis(theme, { type: "category", data: chart.lanes, inverse: true, splitLine: { show: false } }),
        tooltip: { ...base.tooltip, formatter: (one) => {
          const [lane, start, end, label] = chart.spans[one.dataIndex];
          return `${lane}${label ? ` · ${label}` : ""}\n${figure(end - start, "s")}, from ${figure(start, "s")}`;
        } },
        series: [{
          type: "custom", clip: true, encode: { x: [1, 2], y: 0 },
          data: chart.spans.map(([lane, start, end]) => [chart.lanes.indexOf(lane), start, end]),
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
    const all = data.series.flatMap((one) => one.points.map((point) => point[0]));
    const nearest = all.reduce((best, one) => Math.abs(one - x) < Math.abs(best - x) ? one : best, all[0]);
    location.assign(data.href.replace("{x}", nearest));
  }

  function follow(data, event) {
    const target = event.dataType === "edge" ? data.nodes.find((node) => node.name === event.data.target) : event.data;
    const href = data.kind === "bars" ? data.hrefs[event.dataIndex] : data.kind === "flow" && target && target.href;
    if (href) location.assign(href);
  }

  function step(known, event) {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (event.key === "Escape") known.chart.dispatchAction({ type: "hideTip" });
    if (!(event.key in moves)) return;
    event.preventDefault();
    const many = known.chart.getOption().series[0].data.length;
    known.at = Math.min(Math.max(known.at + moves[event.key], 0), many - 1);
    known.chart.dispatchAction({ type: "showTip", seriesIndex: 0, dataIndex: known.at });
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
