// The list of slides: search, order, what was predicted.

import { thumbnailOf, type Collection, type Said, type SlideLine } from "./api";
import { byId, make, probabilityBar } from "./page";

export class SlideList {
  onChoose: (slide: SlideLine) => void = () => {};
  private readonly list = byId<HTMLUListElement>("list");
  private readonly search = byId<HTMLInputElement>("search");
  private readonly sort = byId<HTMLSelectElement>("sort");
  private readonly items = new Map<string, HTMLLIElement>();
  private current: string | null = null;

  constructor(private readonly collection: Collection) {
    this.sort.append(make("option", { value: "" }, "name"));
    for (const target of collection.targets) this.sort.append(make("option", { value: target }, `probability of ${target}`));
    if (collection.targets.length) this.sort.append(make("option", { value: "?differs" }, "call differs from label"));
    this.sort.disabled = collection.targets.length === 0;
    for (const slide of collection.slides) this.items.set(slide.key, this.item(slide));
    this.search.addEventListener("input", () => this.update());
    this.sort.addEventListener("change", () => this.update());
    this.update();
  }

  /** The slides as they are listed now. */
  get visible(): SlideLine[] {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.collection.slides.filter((slide) => {
      const text = [slide.slide_id, slide.patient_id, slide.cohort, slide.split].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const by = this.sort.value;
    const rank = (slide: SlideLine): number =>
      by === "?differs"
        ? Object.values(slide.targets).filter(differs).length
        : by
          ? (slide.targets[by]?.probability ?? -1)
          : 0;
    return found.sort((one, other) => rank(other) - rank(one) || compareNames(one.slide_id, other.slide_id));
  }

  mark(key: string): void {
    if (this.current) this.items.get(this.current)?.firstElementChild?.removeAttribute("aria-current");
    this.current = key;
    const item = this.items.get(key);
    item?.firstElementChild?.setAttribute("aria-current", "true");
    if (item?.isConnected) this.bringIntoView(item);
  }

  /** Choose the slide that stands so many places further. */
  step(places: number): void {
    const visible = this.visible;
    const now = visible.findIndex((slide) => slide.key === this.current);
    const next = now < 0 ? 0 : Math.min(visible.length - 1, Math.max(0, now + places));
    if (visible[next] && next !== now) this.onChoose(visible[next]);
  }

  focusSearch(): void {
    this.search.focus();
    this.search.select();
  }

  /** Scroll as little as needed; the browser's own way would also move where the Tab key goes on from. */
  private bringIntoView(item: HTMLLIElement): void {
    const above = item.offsetTop - this.list.scrollTop;
    const below = above + item.offsetHeight - this.list.clientHeight;
    if (above < 0) this.list.scrollTop += above;
    else if (below > 0) this.list.scrollTop += below;
  }

  private update(): void {
    const visible = this.visible;
    this.list.replaceChildren(...visible.map((slide) => this.items.get(slide.key) as HTMLLIElement));
    const all = this.collection.slides.length;
    const noun = all === 1 ? "slide" : "slides";
    byId("count").textContent = visible.length === all ? `${all} ${noun}` : `${visible.length} of ${all} ${noun}`;
  }

  private item(slide: SlideLine): HTMLLIElement {
    const thumbnail = make("span", { class: "thumbnail" });
    if (slide.has_file) {
      // `loading` first: some browsers ask for a picture as soon as it has an address
      const picture = make("img", { loading: "lazy", decoding: "async", alt: "", src: thumbnailOf(slide.key) });
      picture.addEventListener("error", () => {
        picture.remove();
        thumbnail.classList.add("broken");
      });
      thumbnail.append(picture);
    } else thumbnail.classList.add("broken");
    const group = [slide.cohort, slide.split].filter(Boolean).join(" \u00b7 ");
    const results = Object.entries(slide.targets).map(([target, said]) => resultLine(target, said));
    const button = make(
      "button",
      { type: "button", title: group },
      thumbnail,
      make("span", { class: "lines" }, make("span", { class: "id" }, slide.slide_id), ...results),
    );
    button.addEventListener("click", (event) => {
      this.onChoose(slide);
      // after the pointer, keys are meant for the slide; who came by keys stays in the list
      if (event.detail > 0) byId("stage").focus({ preventScroll: true });
    });
    return make("li", {}, button);
  }
}

function resultLine(target: string, said: Said): HTMLElement {
  return make(
    "span",
    { class: "result" },
    make("span", { class: "target" }, target),
    probabilityBar(said.probability, said.threshold),
    make("span", { class: "number" }, said.probability.toFixed(2)),
    verdict(said),
  );
}

/** Call and label as marks that do not need colour: + or -, and whether the label agrees. */
export function verdict(said: Said): HTMLElement {
  const words = inWords(said);
  const mark = make("span", { class: "verdict", title: words });
  if (said.call !== null) mark.append(make("span", { class: said.call ? "positive" : "negative" }, said.call ? "+" : "\u2212"));
  if (said.call !== null && said.label !== null)
    mark.append(make("span", { class: differs(said) ? "wrong" : "right" }, differs(said) ? "\u2717" : "\u2713"));
  mark.append(make("span", { class: "unseen" }, words));
  return mark;
}

const differs = (said: Said): boolean => said.call !== null && said.label !== null && said.call !== said.label;

export function inWords(said: Said): string {
  const word = (value: 0 | 1 | null): string => (value === null ? "unknown" : value ? "positive" : "negative");
  const call = said.call === null ? "no call: validation gave no threshold" : `called ${word(said.call)}`;
  return said.label === null ? call : `${call}, labelled ${word(said.label)}`;
}

const compareNames = new Intl.Collator("en", { numeric: true }).compare;
