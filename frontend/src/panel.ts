// The panel: what the slide is, what was predicted, which map is drawn and how.

import { tilePictureOf, type Collection, type Layer, type Scale, type Slide, type SlideLine, type Tiles } from "./api";
import { inWords } from "./list";
import { lengthOf, short, signed, tick } from "./numbers";
import { byId, make, probabilityBar } from "./page";

const GALLERY = 8;
const MOST_TICKS = 5;

/** How the map is drawn. */
export interface Drawing {
  layer: Layer | null;
  percentile: boolean;
  opacity: number; // percent
  hide: number; // percent of the scale
  shown: boolean;
}

export class Panel {
  onChange: (change: Partial<Drawing>) => void = () => {};
  onTile: (tile: number) => void = () => {};
  private readonly layer = byId<HTMLSelectElement>("layer");
  private slide: Slide | null = null;

  constructor(private readonly collection: Collection) {
    const opacity = byId<HTMLInputElement>("opacity");
    const hide = byId<HTMLInputElement>("hide");
    const shown = byId<HTMLInputElement>("shown");
    this.layer.addEventListener("change", () =>
      this.onChange({ layer: this.slide?.layers.find((layer) => layer.column === this.layer.value) ?? null }),
    );
    opacity.addEventListener("input", () => this.onChange({ opacity: opacity.valueAsNumber }));
    hide.addEventListener("input", () => this.onChange({ hide: hide.valueAsNumber }));
    shown.addEventListener("change", () => this.onChange({ shown: shown.checked }));
    byId("as-value").addEventListener("click", () => this.onChange({ percentile: false }));
    byId("as-percentile").addEventListener("click", () => this.onChange({ percentile: true }));
  }

  showSlide(slide: Slide): void {
    this.slide = slide;
    byId("name").textContent = slide.slide_id;
    const patient = slide.patient_id && slide.patient_id !== slide.slide_id ? `patient ${slide.patient_id}` : null;
    byId("origin").textContent = [patient, slide.cohort, slide.split].filter(Boolean).join(" \u00b7 ");
    byId("facts").textContent = factsOf(slide).join(" \u00b7 ");
    byId("notes").replaceChildren(...slide.notes.map((note) => make("li", {}, note)));
    this.showResults(slide);
    this.layer.replaceChildren(...slide.layers.map((layer) => make("option", { value: layer.column }, layer.title)));
    byId("map").hidden = byId("influential").hidden = slide.layers.length === 0;
  }

  showFailure(line: SlideLine): void {
    this.slide = null;
    byId("name").textContent = line.slide_id;
    byId("origin").textContent = byId("facts").textContent = "";
    byId("notes").replaceChildren();
  }

  showDrawing(drawing: Drawing, tilesShown: number, tiles: Tiles): void {
    byId<HTMLInputElement>("shown").checked = drawing.shown;
    byId<HTMLInputElement>("opacity").value = String(drawing.opacity);
    byId("opacity-said").textContent = `${drawing.opacity}%`;
    byId<HTMLInputElement>("hide").value = String(drawing.hide);
    byId("as-value").setAttribute("aria-pressed", String(!drawing.percentile));
    byId("as-percentile").setAttribute("aria-pressed", String(drawing.percentile));
    if (!drawing.layer || !this.slide) return;
    this.layer.value = drawing.layer.column;
    const scale = scaleOf(drawing.layer, drawing.percentile);
    this.drawLegend(scale, drawing.percentile);
    byId("hide-name").textContent = scale.diverging ? "Hide tiles nearer to 0 than" : "Hide tiles below";
    const limit = scale.diverging ? (drawing.hide / 100) * scale.high : scale.low + (drawing.hide / 100) * (scale.high - scale.low);
    byId("hide-said").textContent = drawing.hide === 0 ? "none" : short(limit);
    byId("tiles-shown").textContent = `${tilesShown.toLocaleString("en")} of ${tiles.count.toLocaleString("en")} tiles shown`;
    this.showSum(drawing.layer);
  }

  showRank(rank: number, count: number): void {
    byId("rank").textContent = rank < 0 ? `${count.toLocaleString("en")}` : `${(rank + 1).toLocaleString("en")} of ${count.toLocaleString("en")}`;
  }

  /** Show the tiles at the ends of a layer: both ends where 0 is the middle. */
  showGallery(layer: Layer, tiles: Tiles): void {
    const gallery = byId("gallery");
    if (!this.slide) return;
    const values = tiles.values.get(layer.column) as Float32Array;
    const order = Array.from(values.keys()).sort((one, other) => values[other] - values[one]);
    const rows: [string, number[]][] = [];
    if (layer.scale.diverging) {
      const raising = order.filter((tile) => values[tile] > 0).slice(0, GALLERY / 2);
      const lowering = order.filter((tile) => values[tile] < 0).reverse().slice(0, GALLERY / 2);
      const of = layer.kind === "contribution" ? "the logit" : "the score";
      rows.push([`raise ${of}`, raising], [`lower ${of}`, lowering]);
    } else rows.push(["highest", order.slice(0, GALLERY)]);
    gallery.replaceChildren(
      ...rows
        .filter(([, some]) => some.length > 0)
        .map(([name, some]) =>
          make(
            "div",
            { class: "strip", role: "group", "aria-label": `Tiles that ${name}` },
            make("span", { class: "quiet" }, name),
            make("div", { class: "tiles" }, ...some.map((tile) => this.tileButton(tile, layer, values[tile]))),
          ),
        ),
    );
  }

  markInGallery(tile: number): void {
    for (const button of byId("gallery").querySelectorAll<HTMLElement>("[data-tile]"))
      if (button.dataset.tile === String(tile)) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
  }

  private tileButton(tile: number, layer: Layer, value: number): HTMLElement {
    const text = layer.scale.diverging ? signed(value) : short(value);
    const slide = this.slide as Slide;
    const button = make(
      "button",
      { type: "button", title: `${layer.title}: ${text}`, "data-tile": String(tile) },
      slide.has_file
        ? make("img", { loading: "lazy", decoding: "async", alt: "", src: tilePictureOf(slide.key, tile) })
        : make("span", { class: "no-picture" }),
      make("span", {}, text),
    );
    button.addEventListener("click", () => this.onTile(tile));
    return button;
  }

  private showResults(slide: Slide): void {
    const targets = Object.entries(slide.targets);
    byId("said").hidden = targets.length === 0;
    const head = make("tr", {});
    for (const name of ["target", "probability", "threshold", "call", "label"]) head.append(make("th", { scope: "col" }, name));
    const sign = (value: 0 | 1 | null): string => (value === null ? "-" : value ? "+" : "\u2212");
    const rows = targets.map(([target, said]) => {
      const agreed = said.call === null || said.label === null ? "" : said.call === said.label ? "right" : "wrong";
      return make(
        "tr",
        { title: inWords(said) },
        make("th", { scope: "row" }, target),
        make("td", {}, probabilityBar(said.probability, said.threshold), make("span", { class: "number" }, said.probability.toFixed(3))),
        make("td", { class: "number" }, said.threshold === null ? "-" : said.threshold.toFixed(3)),
        make("td", {}, make("span", { class: said.call ? "positive" : "negative" }, sign(said.call))),
        make("td", { class: agreed }, `${sign(said.label)}${agreed ? (agreed === "right" ? " \u2713" : " \u2717") : ""}`),
      );
    });
    byId("results").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
    byId("sum").textContent = "";
  }

  /** Say how the tiles add up to the prediction: that is what contributions mean. */
  private showSum(layer: Layer): void {
    const said = layer.target === null ? undefined : this.slide?.targets[layer.target];
    const sum = byId("sum");
    sum.textContent = "";
    if (!said || said.constant === null || layer.kind !== "contribution") return;
    const fromTiles = said.logit - said.constant;
    const sign = fromTiles < 0 ? "\u2212" : "+";
    sum.textContent =
      `Logit of ${layer.target}: ${short(said.logit)} = ${short(said.constant)} (constant) ` +
      `${sign} ${short(Math.abs(fromTiles))} (all tiles)`;
  }

  private drawLegend(scale: Scale, percentile: boolean): void {
    const canvas = byId<HTMLCanvasElement>("colours");
    const context = canvas.getContext("2d");
    const palette = this.paletteOf(scale);
    palette.forEach(([red, green, blue], place) => {
      if (!context) return;
      context.fillStyle = `rgb(${red} ${green} ${blue})`;
      context.fillRect(place, 0, 1, 1);
    });
    byId("ticks").replaceChildren(
      ...spaced(scale.ticks).map((value) => {
        const label = make("span", {}, tick(value));
        label.style.left = `${(100 * (value - scale.low)) / (scale.high - scale.low)}%`;
        return label;
      }),
    );
    const beyond = percentile ? "" : "; beyond the ends: the ends' colours";
    byId("unit").textContent = scale.unit + beyond;
  }

  paletteOf(scale: Scale): Collection["palettes"]["sequential"] {
    return scale.diverging ? this.collection.palettes.diverging : this.collection.palettes.sequential;
  }
}

/** Keep as many ticks as have room, 0 among them. */
function spaced(ticks: number[]): number[] {
  const every = Math.ceil(ticks.length / MOST_TICKS);
  const zero = Math.max(0, ticks.findIndex((value) => Math.abs(value) < 1e-12));
  return ticks.filter((_, place) => (place - zero) % every === 0);
}

export const scaleOf = (layer: Layer, percentile: boolean): Scale => (percentile ? layer.percentile_scale : layer.scale);

function factsOf(slide: Slide): string[] {
  const { width_px0, height_px0 } = slide.bounds;
  const size =
    slide.mpp === null
      ? `${width_px0.toLocaleString("en")} \u00d7 ${height_px0.toLocaleString("en")} px`
      : `${((width_px0 * slide.mpp) / 1000).toFixed(2)} \u00d7 ${((height_px0 * slide.mpp) / 1000).toFixed(2)} mm`;
  const facts = [size];
  if (slide.mpp !== null) facts.push(`${Number(slide.mpp.toPrecision(4))} \u00b5m/px`);
  if (slide.format) facts.push(slide.format);
  if (slide.tiles !== null) {
    const failed = slide.tiles_failed ? `, ${slide.tiles_failed.toLocaleString("en")} unreadable` : "";
    const side = slide.side_px0 === null ? "" : ` of ${lengthOf(slide.side_px0, slide.mpp)}`;
    facts.push(`${slide.tiles.toLocaleString("en")} tiles${side}${failed}`);
  }
  return facts;
}
