// Values of one tile: in a tooltip at the pointer, and in a dialog with the tile at full resolution.

import { tileImageUrl, type Layer, type Slide, type Tiles } from "./api";
import { createElement, getElement } from "./dom";
import { formatCount, formatLength, formatNumber, formatSigned } from "./formatting";

/** Return a short name of a layer for tables, such as "contribution (EGFR)". */
function layerName(layer: Layer): string {
  return layer.target === null ? layer.kind : `${layer.kind} (${layer.target})`;
}

const formatValue = (layer: Layer, value: number): string =>
  layer.scale.diverging ? formatSigned(value) : formatNumber(value);

/** Format the position of a tile relative to the corner of the bounds. */
function formatPosition(slide: Slide, tiles: Tiles, tile: number): string {
  const x = formatLength(tiles.x[tile] - slide.bounds.x_px0, slide.mpp);
  const y = formatLength(tiles.y[tile] - slide.bounds.y_px0, slide.mpp);
  return `x ${x}, y ${y}`;
}

/** Return whether a tile extends past the right or bottom edge of the bounds. */
function isPastEdge(slide: Slide, tiles: Tiles, tile: number): boolean {
  const { x_px0, y_px0, width_px0, height_px0 } = slide.bounds;
  const side = slide.side_px0 ?? 0;
  return tiles.x[tile] + side > x_px0 + width_px0 || tiles.y[tile] + side > y_px0 + height_px0;
}

export class Tooltip {
  private readonly element = getElement("tooltip");
  private tile = -1;

  hide(): void {
    this.element.hidden = true;
    this.tile = -1;
  }

  show(slide: Slide, tiles: Tiles, currentLayer: Layer | null, tile: number, x: number, y: number): void {
    if (tile !== this.tile || this.element.hidden) {
      this.tile = tile;
      const rows = slide.layers.map((layer) =>
        createElement(
          "tr",
          layer === currentLayer ? { class: "current" } : {},
          createElement("th", { scope: "row" }, layerName(layer)),
          createElement("td", {}, formatValue(layer, tiles.values.get(layer.column)?.[tile] ?? NaN)),
          createElement("td", { class: "muted" }, `${Math.round(tiles.percentiles.get(layer.column)?.[tile] ?? NaN)}%`),
        ),
      );
      const head = createElement("tr", {});
      for (const name of ["", "value", "percentile"]) head.append(createElement("td", { class: "muted" }, name));
      this.element.replaceChildren(
        createElement("p", {}, formatPosition(slide, tiles, tile)),
        createElement("table", {}, createElement("thead", {}, head), createElement("tbody", {}, ...rows)),
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
  onStep: (offset: number) => void = () => {};
  onShowOnSlide: () => void = () => {};
  private readonly dialog = getElement<HTMLDialogElement>("tile-dialog");

  constructor() {
    getElement("tile-close").addEventListener("click", () => this.dialog.close());
    getElement("tile-previous").addEventListener("click", () => this.onStep(-1));
    getElement("tile-next").addEventListener("click", () => this.onStep(1));
    getElement("tile-show").addEventListener("click", () => {
      this.dialog.close();
      this.onShowOnSlide();
    });
    closeOnBackdropClick(this.dialog);
  }

  get isOpen(): boolean {
    return this.dialog.open;
  }

  close(): void {
    this.dialog.close();
  }

  show(slide: Slide, tiles: Tiles, currentLayer: Layer, tile: number): void {
    const rank = tileRank(tiles, tile, currentLayer);
    const criterion = currentLayer.scale.diverging ? `absolute ${layerName(currentLayer)}` : layerName(currentLayer);
    getElement("tile-title").textContent =
      `${slide.slide_id}: tile ${formatCount(rank + 1)} of ${formatCount(tiles.count)} by ${criterion}`;
    const image = getElement<HTMLImageElement>("tile-image");
    const source = slide.has_file ? tileImageUrl(slide.key, tile) : null;
    image.hidden = source === null;
    if (source !== null && image.getAttribute("src") !== source) image.src = source;
    image.alt = `Tile at ${formatPosition(slide, tiles, tile)}`;
    const side = slide.side_px0 ?? 0;
    getElement("tile-size").textContent =
      `${formatLength(side, slide.mpp)} wide, ${formatCount(side)} px on the slide, ${slide.tile_px} px as model input` +
      (isPastEdge(slide, tiles, tile) ? "; extends past the edge of the slide, and is white there" : "");
    const head = createElement("tr", {});
    for (const name of ["", "value", "rank", "percentile"]) head.append(createElement("th", { scope: "col" }, name));
    const rows = slide.layers.map((layer) => {
      const value = tiles.values.get(layer.column)?.[tile] ?? NaN;
      const percentile = tiles.percentiles.get(layer.column)?.[tile] ?? NaN;
      return createElement(
        "tr",
        layer === currentLayer ? { class: "current" } : {},
        createElement("th", { scope: "row" }, layerName(layer)),
        createElement("td", { class: "number" }, formatValue(layer, value)),
        createElement("td", { class: "number" }, formatCount(tileRank(tiles, tile, layer) + 1)),
        createElement("td", { class: "number" }, `${percentile.toFixed(0)}%`),
      );
    });
    const table = getElement("tile-values");
    table.replaceChildren(createElement("thead", {}, head), createElement("tbody", {}, ...rows));
    const absoluteLayers = slide.layers.filter((layer) => layer.scale.diverging).map(layerName);
    const ranking = absoluteLayers.length ? ` Ranked by absolute value: ${absoluteLayers.join(", ")}.` : "";
    getElement("tile-position").textContent =
      `Upper left corner of the tile: ${formatPosition(slide, tiles, tile)} from the corner of the scanned area ` +
      `(level-0 pixels from the corner of the slide: ${formatCount(tiles.x[tile])}, ${formatCount(tiles.y[tile])}).` +
      ranking;
    if (!this.dialog.open) this.dialog.showModal();
  }
}

/** Return the rank of a tile in a layer, from 0. Diverging layers are ranked by absolute value. */
function tileRank(tiles: Tiles, tile: number, layer: Layer): number {
  const values = tiles.values.get(layer.column) as Float32Array;
  const sortValue = (value: number): number => (layer.scale.diverging ? Math.abs(value) : value);
  const own = sortValue(values[tile]);
  let rank = 0;
  for (let other = 0; other < values.length; other++) {
    const value = sortValue(values[other]);
    if (value > own || (value === own && other < tile)) rank++;
  }
  return rank;
}

export function closeOnBackdropClick(dialog: HTMLDialogElement): void {
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
}
