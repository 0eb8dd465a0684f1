// A report's page: its model is in the page itself. What follows ties it to the viewer.
(() => {
  "use strict";
  const pictures = chevron.decode(JSON.parse(document.getElementById("model").textContent));
  const by_id = (id) => document.getElementById(id);
  const prefers_dark = window.matchMedia("(prefers-color-scheme: dark)");
  let theme = prefers_dark.matches ? "dark" : "light";
  const timeline = new chevron.Timeline(by_id("timeline"), {theme});
  const refresh = () => {
    document.documentElement.dataset.theme = theme;
    timeline.set({theme});
    for (const name of ["critical", "memory"]) by_id(name).setAttribute("aria-pressed", String(timeline.options[name]));
    by_id("palette").setAttribute("aria-pressed", String(timeline.options.palette === "safe"));
    by_id("theme").setAttribute("aria-pressed", String(theme === "dark"));
    chevron.legend(by_id("legend"), pictures, timeline.options);
  };
  by_id("critical").hidden = !pictures.some((p) => p.critical.length > 0);
  const does = {
    fit: () => timeline.fit(),
    closer: () => timeline.zoom(1.5),
    farther: () => timeline.zoom(1 / 1.5),
    critical: () => timeline.set({critical: !timeline.options.critical}),
    memory: () => timeline.set({memory: !timeline.options.memory}),
    palette: () => timeline.set({palette: timeline.options.palette === "safe" ? "usual" : "safe"}),
    theme: () => {
      theme = theme === "dark" ? "light" : "dark";
    },
  };
  for (const [id, act] of Object.entries(does))
    by_id(id).addEventListener("click", () => {
      act();
      refresh();
    });
  prefers_dark.addEventListener("change", (e) => {
    theme = e.matches ? "dark" : "light";
    refresh();
  });
  document.addEventListener("keydown", (e) => {
    if (e.target.closest("input, textarea, select")) return;
    if (e.key === "t")
      does.theme();
    else if (!timeline.key(e))
      return;
    e.preventDefault();
    refresh();
  });
  // 100,000 actions are written out only for those who ask.
  by_id("actions").addEventListener("toggle", (e) => {
    const list = e.target.querySelector("pre");
    if (e.target.open && list.textContent === "") list.textContent = chevron.actions_text(pictures[0]);
  });
  timeline.show(pictures);
  refresh();
  window.report = {pictures, timeline};
})();
