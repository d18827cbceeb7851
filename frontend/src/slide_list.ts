// The slide list: search, sorting and a summary of the predictions.

import { thumbnailUrl, type Collection, type SlideSummary, type TargetPrediction } from "./api";
import { createElement, createProbabilityBar, getElement } from "./dom";

const SORT_BY_DISAGREEMENT = "?disagreement"; // other sort values are target names

export class SlideList {
  onSelect: (slide: SlideSummary) => void = () => {};
  private readonly list = getElement<HTMLUListElement>("slide-list");
  private readonly search = getElement<HTMLInputElement>("search");
  private readonly sort = getElement<HTMLSelectElement>("sort");
  private readonly items = new Map<string, HTMLLIElement>();
  private currentKey: string | null = null;

  constructor(private readonly collection: Collection) {
    this.addSortOption("", "name");
    for (const target of collection.targets) this.addSortOption(target, `probability of ${target}`);
    if (collection.targets.length) this.addSortOption(SORT_BY_DISAGREEMENT, "calls that differ from the label");
    this.sort.disabled = collection.targets.length === 0;
    for (const slide of collection.slides) this.items.set(slide.key, this.createItem(slide));
    this.search.addEventListener("input", () => this.update());
    this.sort.addEventListener("change", () => this.update());
    this.update();
  }

  /** The slides that match the search, in the chosen order. */
  get visibleSlides(): SlideSummary[] {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = this.collection.slides.filter((slide) => {
      const text = [slide.slide_id, slide.patient_id, slide.cohort, slide.split].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const criterion = this.sort.value;
    const sortValue = (slide: SlideSummary): number => {
      if (criterion === SORT_BY_DISAGREEMENT) return Object.values(slide.targets).filter(callDiffersFromLabel).length;
      return criterion ? (slide.targets[criterion]?.probability ?? -1) : 0;
    };
    return matches.sort((a, b) => sortValue(b) - sortValue(a) || compareNames(a.slide_id, b.slide_id));
  }

  markCurrent(key: string): void {
    if (this.currentKey) this.items.get(this.currentKey)?.firstElementChild?.removeAttribute("aria-current");
    this.currentKey = key;
    const item = this.items.get(key);
    item?.firstElementChild?.setAttribute("aria-current", "true");
    if (item?.isConnected) this.scrollIntoView(item);
  }

  /** Select the slide that is `offset` places after the current one. */
  step(offset: number): void {
    const slides = this.visibleSlides;
    const current = slides.findIndex((slide) => slide.key === this.currentKey);
    const next = current < 0 ? 0 : Math.min(slides.length - 1, Math.max(0, current + offset));
    if (slides[next] && next !== current) this.onSelect(slides[next]);
  }

  focusSearch(): void {
    this.search.focus();
    this.search.select();
  }

  private addSortOption(value: string, text: string): void {
    this.sort.append(createElement("option", { value }, text));
  }

  /** Scroll as little as needed. The browser's scrollIntoView would also change where the Tab key continues. */
  private scrollIntoView(item: HTMLLIElement): void {
    const above = item.offsetTop - this.list.scrollTop;
    const below = above + item.offsetHeight - this.list.clientHeight;
    if (above < 0) this.list.scrollTop += above;
    else if (below > 0) this.list.scrollTop += below;
  }

  private update(): void {
    const slides = this.visibleSlides;
    this.list.replaceChildren(...slides.map((slide) => this.items.get(slide.key) as HTMLLIElement));
    const total = this.collection.slides.length;
    const noun = total === 1 ? "slide" : "slides";
    getElement("slide-count").textContent =
      slides.length === total ? `${total} ${noun}` : `${slides.length} of ${total} ${noun}`;
  }

  private createItem(slide: SlideSummary): HTMLLIElement {
    const thumbnail = createElement("span", { class: "thumbnail" });
    if (slide.has_file) {
      // `loading` comes before `src`: some browsers start loading as soon as `src` is set.
      const attributes = { loading: "lazy", decoding: "async", alt: "", src: thumbnailUrl(slide.key) };
      const image = createElement("img", attributes);
      image.addEventListener("error", () => {
        image.remove();
        thumbnail.classList.add("missing");
      });
      thumbnail.append(image);
    } else thumbnail.classList.add("missing");
    const origin = [slide.cohort, slide.split].filter(Boolean).join(" \u00b7 ");
    const results = Object.entries(slide.targets).map(([target, result]) => createResultLine(target, result));
    if (slide.warning) results.push(createElement("span", { class: "warning" }, slide.warning));
    const name = createElement("span", { class: "slide-id" }, slide.slide_id);
    const button = createElement(
      "button",
      { type: "button", title: origin },
      thumbnail,
      createElement("span", { class: "lines" }, name, ...results),
    );
    button.addEventListener("click", (event) => {
      this.onSelect(slide);
      // After a mouse click the keys control the slide. Keyboard users (detail is 0) stay in the list.
      if (event.detail > 0) getElement("slide-view").focus({ preventScroll: true });
    });
    return createElement("li", {}, button);
  }
}

function createResultLine(target: string, result: TargetPrediction): HTMLElement {
  return createElement(
    "span",
    { class: "result" },
    createElement("span", { class: "target" }, target),
    createProbabilityBar(result.probability, result.threshold),
    createElement("span", { class: "number" }, result.probability.toFixed(2)),
    createCallSymbols(result),
  );
}

/** Create symbols for the call (+ or -) and its agreement with the label. They are readable without colours. */
function createCallSymbols(result: TargetPrediction): HTMLElement {
  const description = describeCall(result);
  const symbols = createElement("span", { class: "call-symbols", title: description });
  if (result.call !== null) {
    const callClass = result.call ? "positive" : "negative";
    symbols.append(createElement("span", { class: callClass }, result.call ? "+" : "\u2212"));
  }
  if (result.call !== null && result.label !== null) {
    const differs = callDiffersFromLabel(result);
    symbols.append(createElement("span", { class: differs ? "wrong" : "correct" }, differs ? "\u2717" : "\u2713"));
  }
  symbols.append(createElement("span", { class: "visually-hidden" }, description));
  return symbols;
}

const callDiffersFromLabel = (result: TargetPrediction): boolean =>
  result.call !== null && result.label !== null && result.call !== result.label;

export function describeCall(result: TargetPrediction): string {
  const call = result.call === null ? "no call, because the model has no threshold" : `call: ${result.call_name}`;
  return result.label === null ? call : `${call}, label: ${result.label_name}`;
}

const compareNames = new Intl.Collator("en", { numeric: true }).compare;
