// What the browser does by itself: cards slide to their places, code is copied, the address follows the page.
window.freshet = (() => {
  const places = new WeakMap();
  const still = matchMedia("(prefers-reduced-motion: reduce)");

  function remember(grid) {
    for (const card of grid.children) places.set(card, [card.offsetLeft, card.offsetTop]);
  }

  function slide(grid) {
    for (const card of grid.children) {
      const before = places.get(card);
      const [x, y] = [card.offsetLeft, card.offsetTop];
      const timing = { duration: 480, easing: "cubic-bezier(.2,.8,.2,1)" };
      if (still.matches) continue;
      if (!before) card.animate([{ opacity: 0, transform: "scale(.92)" }, { opacity: 1, transform: "none" }], timing);
      else if (before[0] !== x || before[1] !== y)
        card.animate([{ transform: `translate(${before[0] - x}px, ${before[1] - y}px)` }, { transform: "none" }], timing);
    }
    remember(grid);
  }

  function watch() {
    for (const grid of document.querySelectorAll(".cards:not([data-watched])")) {
      grid.dataset.watched = "";
      remember(grid);
      new MutationObserver(() => slide(grid)).observe(grid, { childList: true });
      new ResizeObserver(() => remember(grid)).observe(grid);
    }
  }
  document.addEventListener("DOMContentLoaded", () => {
    new MutationObserver(watch).observe(document.body, { childList: true, subtree: true });
    watch();
  });

  return {
    address(fields) {
      const query = new URLSearchParams(fields).toString();
      history.replaceState(history.state, "", location.pathname + (query ? "?" + query : ""));
    },
    async copy(event, code) {
      const button = event.currentTarget;
      try {
        await navigator.clipboard.writeText(code);
      } catch {
        const range = document.createRange();
        range.selectNodeContents(button.parentElement.querySelector("pre"));
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        document.execCommand("copy");
      }
      button.classList.add("copied");
      setTimeout(() => button.classList.remove("copied"), 1500);
    },
  };
})();
