// Runs before anything is drawn, so that the page never flashes in the other scheme.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => localStorage.getItem("slipstream-theme") || "system";
  const apply = () => {
    const chosen = stored();
    const dark = chosen === "dark" || (chosen === "system" && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    document.dispatchEvent(new Event("themechange"));
  };
  system.addEventListener("change", apply);
  window.slipstreamTheme = {
    get: stored,
    next() {
      const order = ["system", "light", "dark"];
      localStorage.setItem("slipstream-theme", order[(order.indexOf(stored()) + 1) % order.length]);
      apply();
      return stored();
    },
  };
  apply();
})();
