// Helpers for DOM elements. Text is never inserted as HTML, because slide and target names are user input.

export function getElement<Type extends HTMLElement = HTMLElement>(id: string): Type {
  const element = document.getElementById(id);
  if (element === null) throw new Error(`The page has no element with the id ${id}.`);
  return element as Type;
}

type Child = Node | string | null | undefined;

export function createElement<Name extends keyof HTMLElementTagNameMap>(
  name: Name,
  attributes: Record<string, string> = {},
  ...children: Child[]
): HTMLElementTagNameMap[Name] {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.filter((child): child is Node | string => child !== null && child !== undefined));
  return element;
}

/** Create a bar for a probability, with a mark at the threshold. */
export function createProbabilityBar(probability: number, threshold: number | null): HTMLElement {
  const bar = createElement("span", { class: "probability", "aria-hidden": "true" });
  const fill = createElement("span", { class: "probability-fill" });
  fill.style.width = `${100 * probability}%`;
  bar.append(fill);
  if (threshold !== null) {
    const mark = createElement("span", { class: "threshold" });
    mark.style.left = `${100 * threshold}%`;
    bar.append(mark);
  }
  return bar;
}
