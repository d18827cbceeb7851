// Small helpers for elements. Text is always set as text: names of slides and targets come from elsewhere.

export function byId<Kind extends HTMLElement = HTMLElement>(id: string): Kind {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`The page has no element ${id}.`);
  return found as Kind;
}

type Child = Node | string | null | undefined;

export function make<Name extends keyof HTMLElementTagNameMap>(
  name: Name,
  attributes: Record<string, string> = {},
  ...children: Child[]
): HTMLElementTagNameMap[Name] {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.filter((child): child is Node | string => child !== null && child !== undefined));
  return element;
}

/** A bar of a probability, with a mark at its threshold. */
export function probabilityBar(probability: number, threshold: number | null): HTMLElement {
  const bar = make("span", { class: "probability", "aria-hidden": "true" });
  const filled = make("span", { class: "filled" });
  filled.style.width = `${100 * probability}%`;
  bar.append(filled);
  if (threshold !== null) {
    const mark = make("span", { class: "threshold" });
    mark.style.left = `${100 * threshold}%`;
    bar.append(mark);
  }
  return bar;
}
