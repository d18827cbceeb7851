// One tile: its numbers beside the pointer, and at full size with all of them.

import { tilePictureOf, type Layer, type Slide, type Tiles } from "./api";
import { lengthOf, short, signed } from "./numbers";
import { byId, make } from "./page";

/** Name a layer in a few words, for tables. */
export function nameOf(layer: Layer): string {
  return layer.target === null ? layer.kind : `${layer.kind}, ${layer.target}`;
}

const valueOf = (layer: Layer, value: number): string => (layer.scale.diverging ? signed(value) : short(value));

export function placeOf(slide: Slide, tiles: Tiles, tile: number): string {
  const x = lengthOf(tiles.x[tile] - slide.bounds.x_px0, slide.mpp);
  const y = lengthOf(tiles.y[tile] - slide.bounds.y_px0, slide.mpp);
  return `x ${x}, y ${y}`;
}

export class Tooltip {
  private readonly element = byId("tooltip");
  private tile = -1;

  hide(): void {
    this.element.hidden = true;
    this.tile = -1;
  }

  show(slide: Slide, tiles: Tiles, drawn: Layer | null, tile: number, x: number, y: number): void {
    if (tile !== this.tile || this.element.hidden) {
      this.tile = tile;
      const rows = slide.layers.map((layer) =>
        make(
          "tr",
          layer === drawn ? { class: "drawn" } : {},
          make("th", { scope: "row" }, nameOf(layer)),
          make("td", {}, valueOf(layer, tiles.values.get(layer.column)?.[tile] ?? NaN)),
          make("td", { class: "quiet" }, `${Math.round(tiles.percentiles.get(layer.column)?.[tile] ?? NaN)}%`),
        ),
      );
      const head = make("tr", {}, make("td"), make("td"), make("td", { class: "quiet" }, "percentile"));
      this.element.replaceChildren(
        make("p", {}, placeOf(slide, tiles, tile)),
        make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)),
      );
      this.element.hidden = false;
    }
    const frame = this.element.parentElement as HTMLElement;
    const left = x + 18 + this.element.offsetWidth > frame.clientWidth ? x - 18 - this.element.offsetWidth : x + 18;
    const top = Math.min(y + 14, frame.clientHeight - this.element.offsetHeight - 8);
    this.element.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
  }
}

export class TileDialog {
  onStep: (places: number) => void = () => {};
  onShow: () => void = () => {};
  private readonly dialog = byId<HTMLDialogElement>("tile");

  constructor() {
    byId("tile-close").addEventListener("click", () => this.dialog.close());
    byId("tile-previous").addEventListener("click", () => this.onStep(-1));
    byId("tile-next").addEventListener("click", () => this.onStep(1));
    byId("tile-show").addEventListener("click", () => {
      this.dialog.close();
      this.onShow();
    });
    closeOnBackdrop(this.dialog);
  }

  get isOpen(): boolean {
    return this.dialog.open;
  }

  close(): void {
    this.dialog.close();
  }

  /** Show a tile; `rank` is its place in the layer that is drawn. */
  show(slide: Slide, tiles: Tiles, drawn: Layer, tile: number, rank: number): void {
    const by = drawn.scale.diverging ? `absolute ${nameOf(drawn)}` : nameOf(drawn);
    byId("tile-title").textContent = `${slide.slide_id}, tile ${rank + 1} of ${tiles.count.toLocaleString("en")} by ${by}`;
    const picture = byId<HTMLImageElement>("tile-picture");
    const source = slide.has_file ? tilePictureOf(slide.key, tile) : null;
    picture.hidden = source === null;
    if (source !== null && picture.getAttribute("src") !== source) picture.src = source;
    picture.alt = `Tile at ${placeOf(slide, tiles, tile)}`;
    const side = slide.side_px0 ?? 0;
    byId("tile-size").textContent = `${lengthOf(side, slide.mpp)} wide: ${side} px of the slide, ${slide.tile_px} px for the model`;
    const head = make("tr", {});
    for (const name of ["", "value", "rank", "percentile"]) head.append(make("th", { scope: "col" }, name));
    const rows = slide.layers.map((layer) => {
      const values = tiles.values.get(layer.column) as Float32Array;
      const percentile = tiles.percentiles.get(layer.column)?.[tile] ?? NaN;
      return make(
        "tr",
        layer === drawn ? { class: "drawn" } : {},
        make("th", { scope: "row" }, nameOf(layer)),
        make("td", { class: "number" }, valueOf(layer, values[tile])),
        make("td", { class: "number" }, (rankOf(values, tile, layer.scale.diverging) + 1).toLocaleString("en")),
        make("td", { class: "number" }, `${percentile.toFixed(0)}%`),
      );
    });
    byId("tile-numbers").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
    byId("tile-place").textContent =
      `${placeOf(slide, tiles, tile)} from the corner; level 0: ${tiles.x[tile].toLocaleString("en")}, ${tiles.y[tile].toLocaleString("en")}. ` +
      "Ranks of contributions go by their absolute value.";
    byId("tile-place").hidden = false;
    if (!this.dialog.open) this.dialog.showModal();
  }
}

/** Say how many tiles have more. */
export function rankOf(values: Float32Array, tile: number, absolute: boolean): number {
  const size = (value: number): number => (absolute ? Math.abs(value) : value);
  const own = size(values[tile]);
  let rank = 0;
  for (let other = 0; other < values.length; other++) {
    const value = size(values[other]);
    if (value > own || (value === own && other < tile)) rank++;
  }
  return rank;
}

export function closeOnBackdrop(dialog: HTMLDialogElement): void {
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
}
