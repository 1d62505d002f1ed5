// Light, dark, or as the system has it. A classic script in the head: the first paint is right already.

(() => {
  const KEY = "odriver.theme";
  const NEXT = { system: "light", light: "dark", dark: "system" };
  const root = document.documentElement;

  function show(theme) {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (!button) return;
    const words = `Colours: ${theme === "system" ? "as the system has them" : theme}`;
    button.setAttribute("aria-label", words);
    button.title = words;
    button.querySelector("use").setAttribute("href", `#icon-${theme}`);
  }

  show(localStorage.getItem(KEY) in NEXT ? localStorage.getItem(KEY) : "system");
  document.addEventListener("DOMContentLoaded", () => {
    show(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      localStorage.setItem(KEY, NEXT[root.dataset.theme]);
      show(NEXT[root.dataset.theme]);
    });
  });
})();
