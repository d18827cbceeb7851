// The side panel: properties and predictions of the slide, settings of the heatmap, most influential tiles.

import {
  tileImageUrl,
  type Collection,
  type ColourScale,
  type Layer,
  type Slide,
  type SlideSummary,
  type Tiles,
} from "./api";
import { createElement, createProbabilityBar, getElement } from "./dom";
import { formatCount, formatLength, formatNumber, formatSigned, formatTick } from "./formatting";
import { describeCall } from "./slide_list";

const GALLERY_TILES = 8;
const MAX_TICKS = 5;

export interface HeatmapSettings {
  layer: Layer | null;
  percentile: boolean;
  opacity: number; // percent
  hideBelow: number; // tiles below this percentage of the colour scale are hidden
  isVisible: boolean;
}

export class SidePanel {
  onChange: (change: Partial<HeatmapSettings>) => void = () => {};
  onTileClick: (tile: number) => void = () => {};
  private readonly layerSelect = getElement<HTMLSelectElement>("layer");
  private slide: Slide | null = null;

  constructor(private readonly collection: Collection) {
    const opacity = getElement<HTMLInputElement>("opacity");
    const hide = getElement<HTMLInputElement>("hide");
    const showHeatmap = getElement<HTMLInputElement>("show-heatmap");
    this.layerSelect.addEventListener("change", () =>
      this.onChange({ layer: this.slide?.layers.find((layer) => layer.column === this.layerSelect.value) ?? null }),
    );
    opacity.addEventListener("input", () => this.onChange({ opacity: opacity.valueAsNumber }));
    hide.addEventListener("input", () => this.onChange({ hideBelow: hide.valueAsNumber }));
    showHeatmap.addEventListener("change", () => this.onChange({ isVisible: showHeatmap.checked }));
    getElement("show-values").addEventListener("click", () => this.onChange({ percentile: false }));
    getElement("show-percentiles").addEventListener("click", () => this.onChange({ percentile: true }));
  }

  showSlide(slide: Slide): void {
    this.slide = slide;
    getElement("slide-name").textContent = slide.slide_id;
    const patient = slide.patient_id && slide.patient_id !== slide.slide_id ? `patient ${slide.patient_id}` : null;
    getElement("slide-origin").textContent = [patient, slide.cohort, slide.split].filter(Boolean).join(" \u00b7 ");
    getElement("slide-properties").textContent = slideProperties(slide).join(" \u00b7 ");
    getElement("notes").replaceChildren(...slide.notes.map((note) => createElement("li", {}, note)));
    this.showPredictions(slide);
    this.layerSelect.replaceChildren(
      ...slide.layers.map((layer) => createElement("option", { value: layer.column }, layer.title)),
    );
    getElement("heatmap-settings").hidden = getElement("influential-tiles").hidden = slide.layers.length === 0;
  }

  /** Show only the name of a slide that cannot be opened. */
  showUnavailableSlide(slide: SlideSummary): void {
    this.slide = null;
    getElement("slide-name").textContent = slide.slide_id;
    getElement("slide-origin").textContent = getElement("slide-properties").textContent = "";
    getElement("notes").replaceChildren();
  }

  showHeatmapSettings(settings: HeatmapSettings, visibleTiles: number, tiles: Tiles): void {
    getElement<HTMLInputElement>("show-heatmap").checked = settings.isVisible;
    getElement<HTMLInputElement>("opacity").value = String(settings.opacity);
    getElement("opacity-value").textContent = `${settings.opacity}%`;
    getElement<HTMLInputElement>("hide").value = String(settings.hideBelow);
    getElement("show-values").setAttribute("aria-pressed", String(!settings.percentile));
    getElement("show-percentiles").setAttribute("aria-pressed", String(settings.percentile));
    if (!settings.layer || !this.slide) return;
    this.layerSelect.value = settings.layer.column;
    const scale = layerScale(settings.layer, settings.percentile);
    this.drawLegend(scale, settings.percentile);
    const hideLabel = scale.diverging ? "Hide tiles with absolute value below" : "Hide tiles below";
    getElement("hide-label").textContent = hideLabel;
    const fraction = settings.hideBelow / 100;
    const limit = scale.diverging ? fraction * scale.high : scale.low + fraction * (scale.high - scale.low);
    getElement("hide-value").textContent = settings.hideBelow === 0 ? "off" : formatNumber(limit);
    getElement("visible-tiles").textContent = `${formatCount(visibleTiles)} of ${formatCount(tiles.count)} tiles shown`;
    this.showLogitSum(settings.layer);
  }

  showRank(rank: number, count: number): void {
    const total = formatCount(count);
    getElement("rank").textContent = rank < 0 ? `${total} tiles` : `${formatCount(rank + 1)} of ${total}`;
  }

  /** Show the tiles with the highest values of a layer; for a diverging scale also those with the lowest. */
  showGallery(layer: Layer, tiles: Tiles): void {
    if (!this.slide) return;
    const values = tiles.values.get(layer.column) as Float32Array;
    const order = Array.from(values.keys()).sort((a, b) => values[b] - values[a]);
    const rows: [string, number[]][] = [];
    if (layer.scale.diverging) {
      const positive = order.filter((tile) => values[tile] > 0).slice(0, GALLERY_TILES / 2);
      const negative = order.filter((tile) => values[tile] < 0).reverse().slice(0, GALLERY_TILES / 2);
      const isContribution = layer.kind === "contribution";
      rows.push([isContribution ? "Raise the logit" : "Highest scores", positive]);
      rows.push([isContribution ? "Lower the logit" : "Lowest scores", negative]);
    } else rows.push(["Highest values", order.slice(0, GALLERY_TILES)]);
    const nonEmptyRows = rows.filter(([, rowTiles]) => rowTiles.length > 0);
    getElement("gallery").replaceChildren(
      ...nonEmptyRows.map(([title, rowTiles]) =>
        createElement(
          "div",
          { class: "gallery-row", role: "group", "aria-label": title },
          createElement("span", { class: "muted" }, title),
          createElement(
            "div",
            { class: "tiles" },
            ...rowTiles.map((tile) => this.createTileButton(tile, layer, values[tile])),
          ),
        ),
      ),
    );
  }

  markInGallery(tile: number): void {
    for (const button of getElement("gallery").querySelectorAll<HTMLElement>("[data-tile]"))
      if (button.dataset.tile === String(tile)) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
  }

  getPalette(scale: ColourScale): Collection["palettes"]["sequential"] {
    return scale.diverging ? this.collection.palettes.diverging : this.collection.palettes.sequential;
  }

  private createTileButton(tile: number, layer: Layer, value: number): HTMLElement {
    const text = layer.scale.diverging ? formatSigned(value) : formatNumber(value);
    const slide = this.slide as Slide;
    const button = createElement(
      "button",
      { type: "button", title: `${layer.title}: ${text}`, "data-tile": String(tile) },
      slide.has_file
        ? createElement("img", { loading: "lazy", decoding: "async", alt: "", src: tileImageUrl(slide.key, tile) })
        : createElement("span", { class: "no-image" }),
      createElement("span", {}, text),
    );
    button.addEventListener("click", () => this.onTileClick(tile));
    return button;
  }

  private showPredictions(slide: Slide): void {
    const targets = Object.entries(slide.targets);
    getElement("prediction").hidden = targets.length === 0;
    getElement("prediction-warning").textContent = slide.warning;
    const head = createElement("tr", {});
    for (const name of ["target", "probability", "threshold", "call", "label"])
      head.append(createElement("th", { scope: "col" }, name));
    const name = (text: string): string => text || "-";
    const rows = targets.map(([target, result]) => {
      const isKnown = result.call !== null && result.label !== null;
      const isCorrect = result.call === result.label;
      const agreement = isKnown ? (isCorrect ? " \u2713" : " \u2717") : "";
      return createElement(
        "tr",
        { title: describeCall(result) },
        createElement("th", { scope: "row" }, target),
        createElement(
          "td",
          {},
          createProbabilityBar(result.probability, result.threshold),
          createElement("span", { class: "number" }, result.probability.toFixed(3)),
        ),
        createElement("td", { class: "number" }, result.threshold === null ? "-" : result.threshold.toFixed(3)),
        createElement(
          "td",
          {},
          createElement("span", { class: result.call ? "positive" : "negative" }, name(result.call_name)),
        ),
        createElement(
          "td",
          { class: isKnown ? (isCorrect ? "correct" : "wrong") : "" },
          `${name(result.label_name)}${agreement}`,
        ),
      );
    });
    const table = getElement("prediction-table");
    table.replaceChildren(createElement("thead", {}, head), createElement("tbody", {}, ...rows));
    getElement("logit-sum").textContent = "";
  }

  /** Show how the contributions of all tiles add up to the logit. */
  private showLogitSum(layer: Layer): void {
    const result = layer.target === null ? undefined : this.slide?.targets[layer.target];
    const line = getElement("logit-sum");
    line.textContent = "";
    if (!result || result.constant === null || layer.kind !== "contribution") return;
    const tileSum = result.logit - result.constant;
    const sign = tileSum < 0 ? "\u2212" : "+";
    line.textContent =
      `Logit of ${layer.target}: ${formatNumber(result.logit)} = ${formatNumber(result.constant)} (constant) ` +
      `${sign} ${formatNumber(Math.abs(tileSum))} (sum of all tiles)`;
  }

  private drawLegend(scale: ColourScale, percentile: boolean): void {
    const canvas = getElement<HTMLCanvasElement>("colour-bar");
    const context = canvas.getContext("2d");
    this.getPalette(scale).forEach(([red, green, blue], index) => {
      if (!context) return;
      context.fillStyle = `rgb(${red} ${green} ${blue})`;
      context.fillRect(index, 0, 1, 1);
    });
    getElement("ticks").replaceChildren(
      ...selectTicks(scale.ticks).map((value) => {
        const label = createElement("span", {}, formatTick(value));
        label.style.left = `${(100 * (value - scale.low)) / (scale.high - scale.low)}%`;
        return label;
      }),
    );
    const outside = percentile ? "" : " Values outside the scale are drawn in its first or last colour.";
    getElement("unit").textContent = `Unit: ${scale.unit}.${outside}`;
  }
}

/** Select at most `MAX_TICKS` evenly spaced ticks that include 0 if it is a tick. */
function selectTicks(ticks: number[]): number[] {
  const step = Math.ceil(ticks.length / MAX_TICKS);
  const zeroIndex = Math.max(0, ticks.findIndex((value) => Math.abs(value) < 1e-12));
  return ticks.filter((_, index) => (index - zeroIndex) % step === 0);
}

export const layerScale = (layer: Layer, percentile: boolean): ColourScale =>
  percentile ? layer.percentile_scale : layer.scale;

/** Return size, resolution, format and number of tiles of a slide as text. */
function slideProperties(slide: Slide): string[] {
  const { width_px0, height_px0 } = slide.bounds;
  const size =
    slide.mpp === null
      ? `${formatCount(width_px0)} \u00d7 ${formatCount(height_px0)} px`
      : `${((width_px0 * slide.mpp) / 1000).toFixed(2)} \u00d7 ${((height_px0 * slide.mpp) / 1000).toFixed(2)} mm`;
  const properties = [size];
  if (slide.mpp !== null) {
    const source = slide.mpp_source === null ? "" : ` (from ${slide.mpp_source})`;
    properties.push(`${Number(slide.mpp.toPrecision(4))} \u00b5m/px${source}`);
  }
  if (slide.format) properties.push(slide.format);
  if (slide.tiles !== null) {
    const failed = slide.tiles_failed ? `, ${formatCount(slide.tiles_failed)} unreadable` : "";
    const side = slide.side_px0 === null ? "" : ` of ${formatLength(slide.side_px0, slide.mpp)}`;
    properties.push(`${formatCount(slide.tiles)} tiles${side}${failed}`);
  }
  return properties;
}
