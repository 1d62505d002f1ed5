// A line of the last values, in SVG: as wide as its box, with its greatest value at the top.

import { svg } from "./dom.js";

const LENGTH = 120;
const HEIGHT = 40;

export class Sparkline {
  #values = [];
  #line = svg("path", { class: "spark-line" });
  #area = svg("path", { class: "spark-area" });

  /** In this element, which only decorates a number beside it. */
  constructor(into) {
    const attributes = { viewBox: `0 0 ${LENGTH - 1} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" };
    into.append(svg("svg", { class: "spark", ...attributes }, this.#area, this.#line));
  }

  /** One more value; a null is a gap, drawn as nothing happening. */
  push(value) {
    this.#values.push(value ?? 0);
    if (this.#values.length > LENGTH) this.#values.shift();
    this.#draw();
  }

  #draw() {
    const most = Math.max(...this.#values, Number.MIN_VALUE);
    const left = LENGTH - this.#values.length;
    const point = (value, place) => `${left + place},${(HEIGHT - 1.5 - (value / most) * (HEIGHT - 4)).toFixed(2)}`;
    const points = this.#values.map(point).join("L");
    this.#line.setAttribute("d", `M${points}`);
    this.#area.setAttribute("d", `M${left},${HEIGHT}L${points}L${LENGTH - 1},${HEIGHT}Z`);
  }
}
