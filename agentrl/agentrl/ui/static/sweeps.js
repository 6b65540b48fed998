// Kinds of charts that sweeps have: parallel coordinates to brush, and the metric over two settings.
"use strict";

(() => {
  const { kinds, common, axis, figure } = agentrlCharts;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const COLORS = ["#fde725", "#5ec962", "#21918c", "#3b528b", "#440154"]; // viridis

  function scale(chart, theme, values, more) { // the best value stands out from the ground
    const strong = dark.matches ? [...COLORS].reverse() : COLORS;
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return {
      type: "continuous", min: low, max: high > low ? high : low + 1, calculable: false, right: 0, top: "middle",
      inRange: { color: chart.maximize ? strong : [...strong].reverse() }, textStyle: { color: theme.faint },
      formatter: (value) => figure(value, ""), itemHeight: 110, itemWidth: 12, ...more,
    };
  }

  function label(ticks, value) {
    const near = ticks.find(([place]) => Math.abs(place - value) < 1e-6);
    return near ? near[1] : "";
  }

  const placed = (theme, one) => ({
    min: 0, max: 1, name: one.name, axisTick: { show: false },
    axisLabel: { color: theme.ink, textBorderColor: theme.ground, textBorderWidth: 3, customValues: one.ticks.map(([place]) => place), formatter: (value) => label(one.ticks, value), hideOverlap: false },
  });

  kinds.parallel = (chart, theme) => {
    const values = chart.lines.map((line) => line[line.length - 1]);
    const names = [...chart.axes.map((one) => one.name), chart.metric];
    const line = { lineStyle: { color: theme.faint } };
    const short = (name) => theme.narrow ? name.split(/[./]/).pop() : name;
    const base = common(theme);
    return {
      ...base,
      parallel: { left: 30, right: theme.narrow ? 80 : 110, top: 64, bottom: 16, parallelAxisDefault: { nameLocation: "end", nameGap: 14 } },
      parallelAxis: [...chart.axes.map((one, dim) => ({ ...placed(theme, one), dim })),
        { dim: chart.axes.length, name: chart.metric, scale: true, axisLabel: { color: theme.faint, formatter: (value) => figure(value, "") } },
      ].map((one, at) => ({
        ...one, name: short(one.name), axisLine: line, nameRotate: theme.narrow ? 30 : 0,
        nameTextStyle: { color: theme.ink, align: theme.narrow ? "left" : at ? "center" : "left" },
        areaSelectStyle: { width: 22, color: theme.colors[0], borderColor: theme.colors[0], opacity: 0.25 },
      })),
      visualMap: scale(chart, theme, values, { dimension: names.length - 1, seriesIndex: 0 }),
      series: [{
        type: "parallel", inactiveOpacity: 0.06, activeOpacity: 1, lineStyle: { width: 2, opacity: 0.9 },
        emphasis: { lineStyle: { width: 4 } },
        data: chart.lines.map((value, at) => ({
          value, name: `trial ${chart.numbers[at]}`,
          lineStyle: chart.states[at] === "pruned" ? { type: "dashed", width: 1, opacity: 0.6 } : {},
        })),
      }],
      tooltip: {
        ...base.tooltip,
        formatter: (one) => one.seriesType !== "parallel" ? "" : `${one.name}, ${chart.states[one.dataIndex]}\n${chart.metric}: ${figure(values[one.dataIndex], "")}`,
      },
    };
  };

  kinds.contour = (chart, theme) => {
    const count = chart.cells.length;
    const cells = chart.cells.flatMap((row, y) => row.map((value, x) => [x / count, y / count, value]));
    const values = chart.points.map((point) => point[2]);
    const base = common(theme);
    const side = (one, more) => axis(theme, { type: "value", ...placed(theme, one), splitLine: { show: false }, ...more });
    return {
      ...base,
      grid: { left: 44, right: 70, top: 24, bottom: 28, containLabel: true },
      xAxis: side(chart.x, {}), yAxis: side(chart.y, { nameLocation: "end", nameGap: 10, nameTextStyle: { color: theme.faint, align: "left" } }),
      visualMap: scale(chart, theme, values, { dimension: 2 }),
      series: [
        {
          type: "custom", data: cells, silent: true, encode: { x: 0, y: 1 },
          renderItem: (params, api) => {
            const [x1, y1] = api.coord([api.value(0), api.value(1)]);
            const [x2, y2] = api.coord([api.value(0) + 1 / count, api.value(1) + 1 / count]);
            return { type: "rect", shape: { x: x1, y: y2, width: x2 - x1 + 0.6, height: y1 - y2 + 0.6 }, style: { fill: api.visual("color") } };
          },
        },
        { type: "scatter", data: chart.points, symbolSize: 10, itemStyle: { borderColor: theme.ground, borderWidth: 1.5 }, z: 3 },
      ],
      tooltip: { ...base.tooltip, formatter: (one) => `trial ${one.value[3]}\n${chart.metric}: ${figure(one.value[2], "")}` },
    };
  };

  // ---- the table follows the brush

  const known = new WeakSet();

  function follow() {
    for (const canvas of document.querySelectorAll(".chart.parallel .canvas")) {
      const chart = echarts.getInstanceByDom(canvas);
      if (!chart || known.has(chart)) continue;
      known.add(chart);
      chart.on("axisareaselected", () => {
        const series = chart.getModel().getSeries()[0];
        const source = canvas.closest("figure").querySelector("script[type='application/json']");
        const { numbers } = JSON.parse(source.textContent);
        const active = series.getRawIndicesByActiveState("active");
        const brushed = series.getRawIndicesByActiveState("inactive").length > 0;
        choose(brushed ? new Set(active.map((at) => String(numbers[at]))) : null);
      });
    }
  }

  function choose(numbers) {
    const rows = [...document.querySelectorAll("#trials tr[data-trial]")];
    for (const row of rows) row.hidden = numbers !== null && !numbers.has(row.dataset.trial);
    const shown = rows.filter((row) => !row.hidden).length;
    document.getElementById("chosen").textContent = numbers === null ? `${rows.length} trials` : `${shown} of ${rows.length} trials chosen`;
  }

  document.addEventListener("DOMContentLoaded", follow);
  document.addEventListener("htmx:afterSwap", follow);
})();
