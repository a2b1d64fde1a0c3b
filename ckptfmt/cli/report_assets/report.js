/* The charts of `ckptfmt report`, drawn by uPlot from the story in the page. Nothing is fetched. */
(() => {
  "use strict";
  const story = JSON.parse(document.getElementById("story").textContent);
  const commits = story.commits;
  const plots = [];

  const color = (look) =>
    getComputedStyle(document.documentElement).getPropertyValue("--" + look).trim();
  const seconds = (v) => (v == null ? "?" : Number(v.toPrecision(3)) + " s");
  const count = (v) => v.toLocaleString("en-US", { maximumFractionDigits: 0 });
  const utc = (v) => new Date(v * 1000).toISOString().slice(0, 19).replace("T", " ");
  const label = (c) => (c.step == null ? c.name : "step " + count(c.step));

  function bytes(v) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let at = 0;
    while (v >= 1024 && at < units.length - 1) {
      v /= 1024;
      at += 1;
    }
    return Number(v.toPrecision(3)) + " " + units[at];
  }

  /* Ticks that are whole numbers of KiB, MiB...: decimal ones would read 976.6 KiB. */
  function byteTicks(u, axis, low, high) {
    const rough = (high - low) / 5 || 1;
    const size = 2 ** Math.ceil(Math.log2(Math.max(1, rough)));
    const made = [];
    for (let v = Math.ceil(low / size) * size; v <= high; v += size) made.push(v);
    return made;
  }

  /* Of a logarithmic axis: 1 and 3 times the powers of ten, so that the grid stays light. */
  function decades(u, axis, low, high) {
    const made = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e += 1)
      for (const m of [1, 3]) {
        const v = Number((m * 10 ** e).toPrecision(2));
        if (v >= low && v <= high) made.push(v);
      }
    return made;
  }

  /* Clock times of one day; days where the chart spans more. */
  function clock(u, values) {
    const days = u.scales.x.max - u.scales.x.min > 86400 * 1.5;
    const fine = u.scales.x.max - u.scales.x.min < 600;
    return values.map((v) => (days ? utc(v).slice(5, 16) : utc(v).slice(11, fine ? 19 : 16)));
  }

  function tooltip(text) {
    const box = document.createElement("div");
    box.className = "tip";
    return {
      hooks: {
        init: (u) => u.over.appendChild(box),
        setCursor: (u) => {
          const { left, top, idx } = u.cursor;
          box.style.display = idx == null || left < 0 ? "none" : "block";
          if (idx == null || left < 0) return;
          box.textContent = text(idx);
          const wide = u.over.clientWidth;
          box.style.left = Math.max(0, Math.min(left + 12, wide - box.offsetWidth)) + "px";
          box.style.top = Math.max(0, top - box.offsetHeight - 10) + "px";
        },
      },
    };
  }

  /* One chart. `x` and each of `series` are columns of equal length; null is a gap. */
  function chart(id, { x, time = false, padded = true, names, series, y = {}, say, axis, tip }) {
    const place = document.getElementById(id);
    if (!place || !x.length) return;
    const pad = (u, low, high) => {
      if (x.length === 1) return time ? [x[0] - 30, x[0] + 30] : [x[0] - 1, x[0] + 1];
      const more = (high - low) * 0.02 || 0.5;
      return [low - more, high + more];
    };
    const drawn = { stroke: () => color("soft"), grid: { stroke: () => color("line"), width: 1 } };
    const ticks = { stroke: () => color("line"), width: 1, size: 5 };
    const font = "11px system-ui, sans-serif";
    const plot = new uPlot(
      {
        width: place.clientWidth,
        height: place.clientHeight,
        legend: { show: false },
        tzDate: (ts) => uPlot.tzDate(new Date(ts * 1000), "Etc/UTC"),
        cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
        plugins: [tooltip(tip)],
        scales: { x: padded ? { time, range: pad } : { time, range: [-0.7, x.length - 0.3] }, y },
        axes: [
          { ...drawn, ticks, font, grid: { show: false }, values: names, space: 70, size: 34 },
          { ...drawn, ticks, font, size: 66, values: (u, vs) => vs.map((v) => v == null ? "" : say(v)), ...axis },
        ],
        series: [{}, ...series.map(({ values, ...rest }) => rest)],
      },
      [x, ...series.map((s) => s.values)],
      place,
    );
    plots.push(plot);
    new ResizeObserver(() => {
      if (place.clientWidth) plot.setSize({ width: place.clientWidth, height: place.clientHeight });
    }).observe(place);
  }

  const dots = (look, values, size = 8) => ({
    values,
    paths: () => null,
    points: { show: true, size, width: 0, fill: () => color(look), stroke: () => color(look) },
  });
  const ring = (look, values) => ({
    values,
    paths: () => null,
    points: { show: true, size: 15, width: 2, fill: "transparent", stroke: () => color(look) },
  });
  const MANY = 400; /* of so many points a line shows none: they would be all there is to see */
  const line = (look, values, size = values.length > MANY ? 0 : 5) => ({
    values,
    stroke: () => color(look),
    width: 1.6,
    spanGaps: true,
    points: { show: size > 0, size, width: 0, fill: () => color(look), stroke: () => color(look) },
  });
  const only = (rows, test, pick) => rows.map((row) => (test(row) ? pick(row) : null));
  const reasonOf = (c) => c.fate + (c.reason ? ": " + c.reason : "");

  function timeline() {
    const rows = commits.map((c) => ({
      t: c.time_s,
      y: c.step ?? 0,
      look: c.fate,
      tip: label(c) + ", " + utc(c.time_s) + "\n" + reasonOf(c),
    }));
    let last = 0;
    for (const row of story.told) {
      const before = commits.filter((c) => c.time_s <= row.time_s && c.step != null);
      last = row.step ?? (before.length ? before[before.length - 1].step : last);
      const what = row.kind === "restore.done" ? "resume" : "trouble";
      rows.push({ t: row.time_s, y: last, look: what, tip: row.text + "\n" + utc(row.time_s) });
    }
    rows.sort((a, b) => a.t - b.t);
    const of = (look) => only(rows, (row) => row.look === look, (row) => row.y);
    chart("timeline", {
      x: rows.map((row) => row.t),
      time: true,
      names: clock,
      say: (v) => (Number.isInteger(v) ? count(v) : ""),
      tip: (at) => rows[at].tip,
      series: [
        dots("pale", of("deleted"), 6),
        dots("a", of("there")),
        dots("good", of("tagged")),
        dots("bad", of("set aside")),
        dots("b", of("resume")),
        ring("c", of("trouble")),
      ],
    });
  }

  const stepped = commits.filter((c) => c.step != null).sort((a, b) => a.step - b.step);
  const steps = (u, values) => values.map((v) => (Number.isInteger(v) ? count(v) : ""));

  function costs() {
    const rows = stepped.filter((c) => c.durable_s != null || c.stall_s != null);
    const all = rows.flatMap((c) => [c.stall_s, c.stage_s, c.durable_s]).filter((v) => v > 0);
    const wide = all.length > 0 && Math.max(...all) > 50 * Math.min(...all);
    const value = (v) => (v == null || (wide && v <= 0) ? null : v);
    chart("costs", {
      x: rows.map((c) => c.step),
      names: steps,
      say: seconds,
      axis: wide ? { splits: decades } : {},
      y: wide ? { distr: 3 } : { range: (u, low, high) => [0, high * 1.08 || 1] },
      tip: (at) =>
        label(rows[at]) + "\nheld the loop " + seconds(rows[at].stall_s) + "\nof that staging " +
        seconds(rows[at].stage_s) + "\ndurable after " + seconds(rows[at].durable_s),
      series: [
        line("a", rows.map((c) => value(c.durable_s))),
        line("c", rows.map((c) => value(c.stage_s))),
        line("b", rows.map((c) => value(c.stall_s))),
      ],
    });
  }

  function volumes() {
    const rows = commits.filter((c) => c.written_nbytes != null);
    const bars = uPlot.paths.bars({ size: [0.8, 40] });
    const bar = (look, values) => ({
      values,
      paths: bars,
      points: { show: false },
      fill: () => color(look),
      stroke: () => color(look),
      width: 0,
    });
    chart("volumes", {
      x: rows.map((_, at) => at),
      padded: false,
      names: (u, values) => values.map((v) => (rows[v] ? (rows[v].step == null ? rows[v].name : count(rows[v].step)) : "")),
      say: bytes,
      axis: { splits: byteTicks },
      y: { range: (u, low, high) => [0, high * 1.05 || 1] },
      tip: (at) =>
        label(rows[at]) + "\n" + bytes(rows[at].written_nbytes) + " written\n" +
        bytes(Math.max(0, rows[at].nbytes - rows[at].written_nbytes)) + " there already",
      series: [
        bar("pale", rows.map((c) => Math.max(c.nbytes, c.written_nbytes))),
        bar("a", rows.map((c) => c.written_nbytes)),
      ],
    });
  }

  function metric(name, at) {
    const rows = stepped.filter((c) => c.metrics[name] != null);
    const value = (c) => c.metrics[name];
    const of = (fate) => only(rows, (c) => c.fate === fate, value);
    chart("metric-" + at, {
      x: rows.map((c) => c.step),
      names: steps,
      say: (v) => String(Number(v.toPrecision(4))),
      tip: (i) => label(rows[i]) + "\n" + name + " " + Number(value(rows[i]).toPrecision(6)) + "\n" + reasonOf(rows[i]),
      series: [
        line("pale", rows.map(value), 0),
        dots("pale", of("deleted"), 6),
        dots("a", of("there")),
        dots("good", of("tagged")),
        dots("bad", of("set aside")),
      ],
    });
  }

  timeline();
  costs();
  volumes();
  story.metrics.forEach(metric);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const plot of plots) plot.redraw(false);
  });
})();
