// Draws the figures of this page from the data in the page; nothing is loaded from the network.
"use strict";
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const plots = [...document.querySelectorAll(".chart")].map((box) => ({
    box, variants: JSON.parse(box.querySelector("script").textContent), shown: 0,
  }));
  const controls = [...document.querySelectorAll("[data-controls]")];
  let printing = false;

  async function library() {
    const text = atob(document.getElementById("plotly").textContent.trim());
    const bytes = Uint8Array.from(text, (c) => c.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(plain).text();
    document.head.append(script);
  }

  function themed(layout, width) {
    const night = dark.matches && !printing;
    const ink = night ? "#c9d0d8" : "#3a424c", line = night ? "#2c323a" : "#e6e9ed";
    const font = { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 12, color: ink };
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line };
    const hover = { bgcolor: night ? "#1b2026" : "#ffffff", bordercolor: line, font: { color: ink, size: 12 } };
    const clear = "rgba(0,0,0,0)";
    const out = { ...layout, font, hoverlabel: hover, paper_bgcolor: clear, plot_bgcolor: clear };
    for (const key of Object.keys(layout)) {
      if (/^[xy]axis/.test(key)) out[key] = { ...axis, ...layout[key] };
    }
    return width ? { ...out, width, autosize: false } : { ...out, autosize: true };
  }

  function written(data, ink) {
    return data.map((trace) => {
      const font = trace.meta === "faint" ? { insidetextfont: { color: ink } } : {};
      const bars = trace.type === "bar" && trace.error_y ? { error_y: { ...trace.error_y, color: ink } } : {};
      return { ...trace, ...font, ...bars };
    });
  }

  const config = {
    responsive: true, displaylogo: false, displayModeBar: false,
  };

  function draw(plot, width) {
    const { data, layout } = plot.variants[Math.min(plot.shown, plot.variants.length - 1)];
    const theme = themed(layout, width);
    return Plotly.react(plot.box, written(data, theme.font.color), theme, config);
  }

  // Sets the variant of the figures that a selector or a slider controls, and returns these figures.
  function choose(control) {
    if (control.dataset.options) {
      control.closest("p").querySelector("output").textContent = JSON.parse(control.dataset.options)[control.value];
    }
    const controlled = plots.filter((p) => p.box.dataset.name === control.dataset.controls);
    for (const plot of controlled) plot.shown = Number(control.value);
    return controlled;
  }

  // Saves a figure in the colours of the printed page, in any theme.
  async function save(plot) {
    const title = plot.box.parentElement.querySelector("figcaption").textContent || plot.box.dataset.name;
    const filename = title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
    printing = true;
    await draw(plot);
    printing = false;
    await Plotly.downloadImage(plot.box, { format: "svg", filename });
    await draw(plot);
  }

  // Makes each column head a button that sorts the rows by this column: descending, then ascending.
  function sortable(table) {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
    const read = (row, i) => {
      const text = row.cells[i].textContent.trim(), number = parseFloat(text.replace(/[,+\s]/g, "").replace("−", "-"));
      return Number.isNaN(number) ? text : number;
    };
    heads.forEach((head, i) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        heads.forEach((h) => h.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].sort((a, b) => {
          const x = read(a, i), y = read(b, i);
          if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
          const order = typeof x === "number" ? y - x : y.localeCompare(x);
          return down ? order : -order;
        });
        body.append(...rows);
      });
    });
  }

  // Marks the visible section in the list of sections. On a phone, the list scrolls to this section.
  function follow() {
    const list = document.querySelector("nav ul");
    if (!list) return;
    const links = new Map([...list.querySelectorAll("a")].map((link) => [link.hash.slice(1), link]));
    const first = document.getElementById(links.keys().next().value);
    const observer = new IntersectionObserver((entries) => {
      const section = entries.find((entry) => entry.isIntersecting);
      const aboveAll = first.getBoundingClientRect().top > window.innerHeight / 4;
      if (!section && !aboveAll) return;
      list.querySelector("[aria-current]")?.removeAttribute("aria-current");
      if (!section) {
        list.scrollLeft = 0;
        return;
      }
      const link = links.get(section.target.id);
      link.setAttribute("aria-current", "true");
      list.scrollLeft = link.offsetLeft - list.offsetLeft - 24;
    }, { rootMargin: "-120px 0px -75% 0px" });
    for (const name of links.keys()) observer.observe(document.getElementById(name));
  }

  function listen() {
    follow();
    document.querySelectorAll("table.sortable").forEach(sortable);
    for (const control of controls) {
      control.addEventListener(control.type === "range" ? "input" : "change", () => choose(control).forEach((p) => draw(p)));
    }
    for (const plot of plots) {
      plot.box.parentElement.querySelector("button").addEventListener("click", () => save(plot));
    }
    dark.addEventListener("change", () => plots.forEach((p) => draw(p)));
    window.addEventListener("beforeprint", () => {
      printing = true;
      plots.forEach((p) => draw(p, p.box.closest(".small") ? 300 : 640));
    });
    window.addEventListener("afterprint", () => {
      printing = false;
      plots.forEach((p) => draw(p));
    });
  }

  library().then(() => {
    // A browser may restore the values of controls when a reader comes back to the page.
    controls.forEach(choose);
    return Promise.all(plots.map((p) => draw(p)));
  }).then(() => {
    listen();
    document.body.dataset.drawn = String(plots.length);
  }).catch((error) => {
    document.getElementById("trouble").hidden = false;
    document.body.dataset.drawn = "failed";
    console.error(error);
  });
})();
