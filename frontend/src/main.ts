// Entry point of the viewer: connects the slide list, the slide view, the side panel and the dialogs.

import {
  fetchCollection,
  fetchSlide,
  fetchTiles,
  NO_TILES,
  type Collection,
  type Layer,
  type Slide,
  type SlideSummary,
  type Tiles,
} from "./api";
import { getElement } from "./dom";
import { KeyboardShortcuts } from "./shortcuts";
import { layerScale, SidePanel, type HeatmapSettings } from "./side_panel";
import { SlideList } from "./slide_list";
import { SlideView, type ViewPosition } from "./slide_view";
import { TileDialog, Tooltip } from "./tile_dialog";
import { formatViewHash, parseViewHash, type ViewState } from "./view_link";

const ZOOM_FACTOR = 1.6; // of the buttons and keys
const PAN_DIRECTIONS: Record<string, [number, number]> = {
  ArrowLeft: [-0.2, 0],
  ArrowRight: [0.2, 0],
  ArrowUp: [0, -0.2],
  ArrowDown: [0, 0.2],
};

class Viewer {
  private readonly slideView = new SlideView();
  private readonly tooltip = new Tooltip();
  private readonly dialog = new TileDialog();
  private readonly list: SlideList;
  private readonly panel: SidePanel;
  private slide: Slide | null = null; // null if the selected slide cannot be opened
  private selectedSlide: SlideSummary | null = null;
  private tiles: Tiles = NO_TILES;
  private tileOrder: number[] = []; // most influential first
  private settings: HeatmapSettings = { layer: null, percentile: false, opacity: 55, hideBelow: 0, isVisible: true };
  private appliedValues = ""; // identifies the values by which the tiles are currently sorted and coloured
  private latestRequest = 0; // number of the latest slide request; responses to earlier ones are ignored
  private finishedRequest = 0;
  private hash = location.hash; // the last fragment that was read or written

  constructor(private readonly collection: Collection) {
    this.list = new SlideList(collection);
    this.panel = new SidePanel(collection);
    this.list.onSelect = (slide) => void this.openSlide(slide, {});
    this.panel.onChange = (change) => this.updateHeatmap(change);
    this.panel.onTileClick = (tile) => this.selectTile(tile, { moveToTile: true, openDialog: true });
    this.slideView.onMove = () => this.updateAddress();
    this.slideView.onHover = (tile, x, y) => this.handleHover(tile, x, y);
    this.slideView.onClick = (tile) => this.handleClick(tile);
    this.slideView.onImageError = () =>
      this.showMessage("Some regions of this slide could not be loaded. The terminal of tapfm view shows the reason.");
    this.dialog.onStep = (offset) => this.stepTile(offset);
    this.dialog.onShowOnSlide = () => this.selectTile(this.slideView.selectedTile, { moveToTile: true });
    this.connectButtons();
    this.addShortcuts();
    addEventListener("hashchange", () => void this.restoreView());
  }

  /** Show the view that the URL fragment describes. */
  async restoreView(): Promise<void> {
    this.hash = location.hash;
    const view = parseViewHash(this.hash);
    const requested = this.collection.slides.find((slide) => slide.slide_id === view.slide);
    const slide = requested ?? this.list.visibleSlides[0];
    if (slide) await this.openSlide(slide, view);
    if (view.slide !== undefined && !requested)
      this.showMessage(`Slide ${view.slide} was not found. Start tapfm view with a folder or table that contains it.`);
  }

  private async openSlide(summary: SlideSummary, view: ViewState): Promise<void> {
    const hasPosition = view.x !== undefined && view.y !== undefined && view.zoom !== undefined;
    const position = hasPosition ? (view as ViewPosition) : null;
    document.title = `${summary.slide_id} \u00b7 tapfm view`;
    this.list.markCurrent(summary.key);
    this.tooltip.hide();
    this.showMessage("");
    document.body.classList.remove("slides-open");
    getElement("toggle-slides").setAttribute("aria-expanded", "false");
    const request = ++this.latestRequest;
    if (this.slide?.key === summary.key) {
      this.finishedRequest = request;
      this.applySettings(view);
      if (position) this.slideView.moveTo(position, true);
      return;
    }
    try {
      const slide = await fetchSlide(summary.key);
      const tiles = slide.layers.length ? await fetchTiles(summary.key) : NO_TILES;
      if (request !== this.latestRequest) return;
      this.finishedRequest = request;
      this.showSlide(slide, tiles, view, position);
    } catch (error) {
      if (request !== this.latestRequest) return;
      this.finishedRequest = request;
      this.slide = null;
      this.selectedSlide = summary;
      this.slideView.close();
      this.dialog.close();
      document.body.classList.add("without-panel");
      this.panel.showUnavailableSlide(summary);
      this.showMessage(`${summary.slide_id}: ${(error as Error).message}`);
      this.updateAddress();
    }
  }

  private showSlide(slide: Slide, tiles: Tiles, view: ViewState, position: ViewPosition | null): void {
    this.slide = this.selectedSlide = slide;
    this.tiles = tiles;
    this.dialog.close();
    this.appliedValues = "";
    const hasPrediction = slide.layers.length > 0 || Object.keys(slide.targets).length > 0;
    document.body.classList.toggle("without-panel", !hasPrediction);
    this.panel.showSlide(slide);
    const { x_px0, y_px0 } = slide.bounds;
    this.slideView.heatmap.setTiles(tiles, slide.side_px0 ?? 0, { x: x_px0, y: y_px0 });
    this.slideView.open(slide, position);
    // Keep the current layer if the new slide has it.
    const sameLayer = slide.layers.find((layer) => layer.column === this.settings.layer?.column);
    this.settings.layer = sameLayer ?? slide.layers[0] ?? null;
    this.applySettings(view);
  }

  /** Apply the heatmap settings of a link; undefined ones stay unchanged. */
  private applySettings(view: ViewState): void {
    const layer = this.slide?.layers.find((each) => each.column === view.layer);
    this.updateHeatmap({
      ...(layer && { layer }),
      ...(view.percentile !== undefined && { percentile: view.percentile }),
      ...(view.opacity !== undefined && { opacity: view.opacity }),
      ...(view.hideBelow !== undefined && { hideBelow: view.hideBelow }),
      ...(view.heatmap !== undefined && { isVisible: view.heatmap }),
    });
  }

  private updateHeatmap(change: Partial<HeatmapSettings>): void {
    Object.assign(this.settings, change);
    const { layer, percentile, hideBelow, opacity, isVisible } = this.settings;
    const heatmap = this.slideView.heatmap;
    heatmap.isVisible = isVisible;
    heatmap.setMinStrength(hideBelow / 100);
    this.slideView.opacity = opacity / 100;
    if (layer && this.slide) this.applyLayer(this.slide, layer, percentile);
    else this.tileOrder = [];
    this.panel.showHeatmapSettings(this.settings, heatmap.visibleCount, this.tiles);
    this.panel.showRank(this.tileOrder.indexOf(this.slideView.selectedTile), this.tileOrder.length);
    this.slideView.redraw();
    this.updateAddress();
  }

  /** Sort and colour the tiles by a layer. Does nothing if this is done already, because sliders call it often. */
  private applyLayer(slide: Slide, layer: Layer, percentile: boolean): void {
    const wanted = `${slide.key} ${percentile} ${layer.column}`;
    if (wanted === this.appliedValues) return;
    const values = this.tiles.values.get(layer.column) as Float32Array;
    const scale = layerScale(layer, percentile);
    const shownValues = percentile ? (this.tiles.percentiles.get(layer.column) as Float32Array) : values;
    this.appliedValues = wanted;
    this.slideView.heatmap.setValues(shownValues, scale, this.panel.getPalette(scale));
    this.tileOrder = sortByInfluence(values, layer);
    this.panel.showGallery(layer, this.tiles);
    this.panel.markInGallery(this.slideView.selectedTile);
  }

  private selectTile(tile: number, { moveToTile = false, openDialog = false }): void {
    if (!this.slide || tile < 0 || !this.settings.layer) return;
    this.slideView.selectedTile = tile;
    this.tooltip.hide();
    this.panel.showRank(this.tileOrder.indexOf(tile), this.tileOrder.length);
    this.panel.markInGallery(tile);
    if (moveToTile) this.slideView.moveToTile(this.tiles.x[tile], this.tiles.y[tile], this.slide.side_px0 ?? 1);
    this.slideView.redrawOutlines();
    if (openDialog || this.dialog.isOpen) this.dialog.show(this.slide, this.tiles, this.settings.layer, tile);
  }

  /** Select the tile that is `offset` ranks less influential than the current one. */
  private stepTile(offset: number): void {
    if (!this.tileOrder.length) return;
    const current = this.tileOrder.indexOf(this.slideView.selectedTile);
    const next = current < 0 ? 0 : Math.min(this.tileOrder.length - 1, Math.max(0, current + offset));
    this.selectTile(this.tileOrder[next], { moveToTile: true });
  }

  private handleClick(tile: number): void {
    const isHidden = this.settings.isVisible && this.slideView.heatmap.isHidden(tile);
    if (tile >= 0 && !isHidden) this.selectTile(tile, { openDialog: true });
  }

  private handleHover(tile: number, x: number, y: number): void {
    if (this.slide && tile >= 0) this.tooltip.show(this.slide, this.tiles, this.settings.layer, tile, x, y);
    else this.tooltip.hide();
  }

  private stepLayer(offset: number): void {
    const layers = this.slide?.layers ?? [];
    if (!layers.length) return;
    const current = layers.findIndex((layer) => layer === this.settings.layer);
    this.updateHeatmap({ layer: layers[(current + offset + layers.length) % layers.length] });
  }

  private changeOpacity(percent: number): void {
    this.updateHeatmap({ opacity: Math.min(100, Math.max(0, this.settings.opacity + percent)) });
  }

  private currentView(): ViewState {
    if (!this.slide) return { slide: this.selectedSlide?.slide_id };
    const { layer, percentile, opacity, hideBelow, isVisible } = this.settings;
    const heatmap = { layer: layer?.column, percentile, opacity, hideBelow, heatmap: isVisible };
    return { slide: this.slide.slide_id, ...this.slideView.position, ...heatmap };
  }

  /** Write the current view into the URL fragment. */
  private updateAddress(): void {
    if (!this.selectedSlide || (this.slide && !this.slideView.position)) return;
    if (this.finishedRequest !== this.latestRequest || this.hash !== location.hash) return; // a new view is loading
    // Only a change of the slide adds an entry to the browser history, not every move.
    const previous = parseViewHash(this.hash).slide;
    const isKnown = this.collection.slides.some((slide) => slide.slide_id === previous);
    const method = isKnown && previous !== this.selectedSlide.slide_id ? "pushState" : "replaceState";
    history[method](null, "", location.pathname + formatViewHash(this.currentView()));
    this.hash = location.hash;
  }

  private showMessage(text: string): void {
    const message = getElement("message");
    message.textContent = text;
    message.hidden = text === "";
  }

  private async copyLink(): Promise<void> {
    this.updateAddress();
    const status = getElement("copy-status");
    try {
      await navigator.clipboard.writeText(location.href);
      status.textContent = "Copied";
    } catch {
      // Browsers allow access to the clipboard only for localhost and HTTPS.
      status.textContent = "Not copied. Copy the link from the address bar";
    }
    setTimeout(() => (status.textContent = ""), 3000);
  }

  private connectButtons(): void {
    const onClick = (id: string, action: () => void): void => getElement(id).addEventListener("click", action);
    onClick("zoom-in", () => this.slideView.zoomBy(ZOOM_FACTOR));
    onClick("zoom-out", () => this.slideView.zoomBy(1 / ZOOM_FACTOR));
    onClick("whole-slide", () => this.slideView.showWholeSlide());
    onClick("full-resolution", () => this.slideView.showFullResolution());
    onClick("next-tile", () => this.stepTile(1));
    onClick("previous-tile", () => this.stepTile(-1));
    onClick("copy-link", () => void this.copyLink());
    for (const [id, other] of [["slides", "panel"], ["panel", "slides"]])
      onClick(`toggle-${id}`, () => {
        document.body.classList.remove(`${other}-open`);
        const isOpen = document.body.classList.toggle(`${id}-open`);
        getElement(`toggle-${id}`).setAttribute("aria-expanded", String(isOpen));
        getElement(`toggle-${other}`).setAttribute("aria-expanded", "false");
      });
  }

  private addShortcuts(): void {
    const view = this.slideView;
    const shortcuts = new KeyboardShortcuts([
      { keys: ["j"], description: "Next slide", action: () => this.list.step(1) },
      { keys: ["k"], description: "Previous slide", action: () => this.list.step(-1) },
      { keys: ["/"], description: "Search slides", action: () => this.list.focusSearch() },
      {
        keys: ["h"],
        description: "Show or hide the heatmap",
        action: () => this.updateHeatmap({ isVisible: !this.settings.isVisible }),
      },
      { keys: ["l"], description: "Next layer", action: () => this.stepLayer(1) },
      {
        keys: ["p"],
        description: "Switch between values and percentiles",
        action: () => this.updateHeatmap({ percentile: !this.settings.percentile }),
      },
      { keys: ["["], description: "Decrease heatmap opacity", action: () => this.changeOpacity(-10) },
      { keys: ["]"], description: "Increase heatmap opacity", action: () => this.changeOpacity(10) },
      {
        keys: ["t"],
        description: "Most influential tile",
        action: () => this.selectTile(this.tileOrder[0] ?? -1, { moveToTile: true }),
        worksInDialog: true,
      },
      { keys: ["n"], description: "Next tile by influence", action: () => this.stepTile(1), worksInDialog: true },
      { keys: ["b"], description: "Previous tile by influence", action: () => this.stepTile(-1), worksInDialog: true },
      {
        keys: ["Enter"],
        description: "Open the selected tile",
        action: () => this.selectTile(view.selectedTile, { openDialog: true }),
      },
      { keys: ["+"], aliases: ["="], description: "Zoom in", action: () => view.zoomBy(ZOOM_FACTOR) },
      { keys: ["-"], aliases: ["_"], description: "Zoom out", action: () => view.zoomBy(1 / ZOOM_FACTOR) },
      { keys: ["1"], description: "Full resolution", action: () => view.showFullResolution() },
      { keys: ["0", "Home"], description: "Whole slide", action: () => view.showWholeSlide() },
      {
        keys: Object.keys(PAN_DIRECTIONS),
        description: "Pan",
        action: (key) => view.panBy(...PAN_DIRECTIONS[key]),
      },
      {
        keys: ["?"],
        description: "Show or hide this list",
        action: () => shortcuts.toggleHelp(),
        worksInDialog: true,
      },
    ]);
  }
}

/** Return the tiles by descending value; for a diverging scale, by descending absolute value. */
function sortByInfluence(values: Float32Array, layer: Layer): number[] {
  const influence = (value: number): number => (layer.scale.diverging ? Math.abs(value) : value);
  return Array.from(values.keys()).sort((a, b) => influence(values[b]) - influence(values[a]) || a - b);
}

async function start(): Promise<void> {
  const message = getElement("message");
  // The token is in a cookie now. Remove it from the address so that copied links do not contain it.
  history.replaceState(null, "", location.pathname + location.hash);
  try {
    await new Viewer(await fetchCollection()).restoreView();
  } catch (error) {
    message.textContent = (error as Error).message;
    message.hidden = false;
  }
}

void start();
