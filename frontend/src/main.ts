// The viewer: puts list, slide, panel and dialogs together.

import {
  fetchCollection,
  fetchSlide,
  fetchTiles,
  NO_TILES,
  type Collection,
  type Layer,
  type Slide,
  type SlideLine,
  type Tiles,
} from "./api";
import { Keys } from "./keys";
import { readView, writeView, type View } from "./link";
import { SlideList } from "./list";
import { byId } from "./page";
import { Panel, scaleOf, type Drawing } from "./panel";
import { Stage, type Place } from "./stage";
import { rankOf, TileDialog, Tooltip } from "./tile_dialog";

const DIRECTIONS: Record<string, [number, number]> = {
  ArrowLeft: [-0.2, 0],
  ArrowRight: [0.2, 0],
  ArrowUp: [0, -0.2],
  ArrowDown: [0, 0.2],
};

class Viewer {
  private readonly stage = new Stage();
  private readonly tooltip = new Tooltip();
  private readonly dialog = new TileDialog();
  private readonly list: SlideList;
  private readonly panel: Panel;
  private slide: Slide | null = null;
  private opened: SlideLine | null = null; // the slide, or the one that could not be shown
  private tiles: Tiles = NO_TILES;
  private order: number[] = []; // of tiles, the most influential first
  private drawing: Drawing = { layer: null, percentile: false, opacity: 55, hide: 0, shown: true };
  private numbers = ""; // which ones the tiles are sorted and coloured by
  private asked = 0; // counts slides that were asked for: answers that come late are dropped
  private answered = 0; // the last of them that was answered
  private hash = location.hash; // as we know it: another one is about to be restored

  constructor(private readonly collection: Collection) {
    this.list = new SlideList(collection);
    this.panel = new Panel(collection);
    this.list.onChoose = (slide) => void this.open(slide, {});
    this.panel.onChange = (change) => this.draw(change);
    this.panel.onTile = (tile) => this.choose(tile, { go: true, open: true });
    this.stage.onMoved = () => this.writeAddress();
    this.stage.onHover = (tile, x, y) => this.hover(tile, x, y);
    this.stage.onClick = (tile) => this.clicked(tile);
    this.stage.onBroken = () => this.tell("Parts of this slide cannot be read.");
    this.dialog.onStep = (places) => this.step(places);
    this.dialog.onShow = () => this.choose(this.stage.chosen, { go: true });
    this.connectButtons();
    this.makeKeys();
    addEventListener("hashchange", () => void this.restore());
  }

  async restore(): Promise<void> {
    this.hash = location.hash;
    const view = readView(this.hash);
    const named = this.collection.slides.find((slide) => slide.slide_id === view.slide);
    const slide = named ?? this.list.visible[0];
    if (slide) await this.open(slide, view);
    if (view.slide !== undefined && !named) this.tell(`There is no slide ${view.slide} here.`);
  }

  private async open(line: SlideLine, view: View): Promise<void> {
    const place = view.x !== undefined && view.y !== undefined && view.zoom !== undefined ? (view as Place) : null;
    document.title = `${line.slide_id} \u00b7 tapfm view`;
    this.list.mark(line.key);
    this.tooltip.hide();
    this.tell("");
    document.body.classList.remove("with-slides");
    byId("toggle-slides").setAttribute("aria-expanded", "false");
    const asked = ++this.asked;
    if (this.slide?.key === line.key) {
      this.answered = asked;
      this.take(view);
      if (place) this.stage.go(place, true);
      return;
    }
    try {
      const slide = await fetchSlide(line.key);
      const tiles = slide.layers.length ? await fetchTiles(line.key) : NO_TILES;
      if (asked !== this.asked) return;
      this.answered = asked;
      this.show(slide, tiles, view, place);
    } catch (error) {
      if (asked !== this.asked) return;
      this.answered = asked;
      this.slide = null;
      this.opened = line;
      this.stage.close();
      this.dialog.close();
      document.body.classList.add("without-panel");
      this.panel.showFailure(line);
      this.tell(`${line.slide_id}: ${(error as Error).message}`);
      this.writeAddress();
    }
  }

  private show(slide: Slide, tiles: Tiles, view: View, place: Place | null): void {
    this.slide = this.opened = slide;
    this.tiles = tiles;
    this.dialog.close();
    this.numbers = "";
    document.body.classList.toggle("without-panel", slide.layers.length === 0 && Object.keys(slide.targets).length === 0);
    this.panel.showSlide(slide);
    const { x_px0, y_px0 } = slide.bounds;
    this.stage.map.setTiles(tiles, slide.side_px0 ?? 0, { x: x_px0, y: y_px0 });
    this.stage.open(slide, place);
    // the layer stays from slide to slide, where the next one has it
    const same = slide.layers.find((layer) => layer.column === this.drawing.layer?.column);
    this.drawing.layer = same ?? slide.layers[0] ?? null;
    this.take(view);
  }

  private take(view: View): void {
    const layer = this.slide?.layers.find((each) => each.column === view.layer);
    this.draw({
      ...(layer && { layer }),
      ...(view.percentile !== undefined && { percentile: view.percentile }),
      ...(view.opacity !== undefined && { opacity: view.opacity }),
      ...(view.hide !== undefined && { hide: view.hide }),
      ...(view.shown !== undefined && { shown: view.shown }),
    });
  }

  private draw(change: Partial<Drawing>): void {
    Object.assign(this.drawing, change);
    const { layer, percentile, hide, opacity, shown } = this.drawing;
    const map = this.stage.map;
    map.shown = shown;
    map.setHiding(hide / 100);
    this.stage.opacity = opacity / 100;
    if (layer && this.slide) this.chooseNumbers(this.slide, layer, percentile);
    else this.order = [];
    this.panel.showDrawing(this.drawing, map.visibleCount, this.tiles);
    this.panel.showRank(this.order.indexOf(this.stage.chosen), this.order.length);
    this.stage.redraw();
    this.writeAddress();
  }

  /** Sort and colour the tiles by a layer, unless that is done: sliders ask often. */
  private chooseNumbers(slide: Slide, layer: Layer, percentile: boolean): void {
    const numbers = `${slide.key} ${percentile} ${layer.column}`;
    if (numbers === this.numbers) return;
    const values = this.tiles.values.get(layer.column) as Float32Array;
    const scale = scaleOf(layer, percentile);
    const shown = percentile ? (this.tiles.percentiles.get(layer.column) as Float32Array) : values;
    this.numbers = numbers;
    this.stage.map.setValues(shown, scale, this.panel.paletteOf(scale));
    this.order = influence(values, layer);
    this.panel.showGallery(layer, this.tiles);
    this.panel.markInGallery(this.stage.chosen);
  }

  private choose(tile: number, { go = false, open = false }): void {
    if (!this.slide || tile < 0 || !this.drawing.layer) return;
    this.stage.chosen = tile;
    this.tooltip.hide();
    this.panel.showRank(this.order.indexOf(tile), this.order.length);
    this.panel.markInGallery(tile);
    if (go) this.stage.goToTile(this.tiles.x[tile], this.tiles.y[tile], this.slide.side_px0 ?? 1);
    this.stage.redrawMarks();
    if (open || this.dialog.isOpen) {
      const values = this.tiles.values.get(this.drawing.layer.column) as Float32Array;
      const rank = rankOf(values, tile, this.drawing.layer.scale.diverging);
      this.dialog.show(this.slide, this.tiles, this.drawing.layer, tile, rank);
    }
  }

  /** Go to the tile so many places further down in influence. */
  private step(places: number): void {
    if (!this.order.length) return;
    const now = this.order.indexOf(this.stage.chosen);
    const next = now < 0 ? 0 : Math.min(this.order.length - 1, Math.max(0, now + places));
    this.choose(this.order[next], { go: true });
  }

  private clicked(tile: number): void {
    if (tile >= 0 && !(this.drawing.shown && this.stage.map.isHidden(tile))) this.choose(tile, { open: true });
  }

  private hover(tile: number, x: number, y: number): void {
    if (this.slide && tile >= 0) this.tooltip.show(this.slide, this.tiles, this.drawing.layer, tile, x, y);
    else this.tooltip.hide();
  }

  private stepLayer(places: number): void {
    const layers = this.slide?.layers ?? [];
    if (!layers.length) return;
    const now = layers.findIndex((layer) => layer === this.drawing.layer);
    this.draw({ layer: layers[(now + places + layers.length) % layers.length] });
  }

  private view(): View {
    if (!this.slide) return { slide: this.opened?.slide_id };
    const { layer, percentile, opacity, hide, shown } = this.drawing;
    return { slide: this.slide.slide_id, ...this.stage.place, layer: layer?.column, percentile, opacity, hide, shown };
  }

  private writeAddress(): void {
    if (!this.opened || (this.slide && !this.stage.place)) return;
    if (this.answered !== this.asked || this.hash !== location.hash) return; // another view is on its way
    // the way back leads from slide to slide, not through every move
    const before = readView(this.hash).slide;
    const known = this.collection.slides.some((slide) => slide.slide_id === before);
    const write = known && before !== this.opened.slide_id ? "pushState" : "replaceState";
    history[write](null, "", location.pathname + writeView(this.view()));
    this.hash = location.hash;
  }

  private tell(text: string): void {
    const message = byId("message");
    message.textContent = text;
    message.hidden = text === "";
  }

  private async copyLink(): Promise<void> {
    this.writeAddress();
    const copied = byId("copied");
    try {
      await navigator.clipboard.writeText(location.href);
      copied.textContent = "copied";
    } catch {
      copied.textContent = "it is in the address bar"; // browsers allow copying on safe addresses only
    }
    setTimeout(() => (copied.textContent = ""), 3000);
  }

  private connectButtons(): void {
    const click = (id: string, does: () => void): void => byId(id).addEventListener("click", does);
    click("zoom-in", () => this.stage.zoomBy(1.6));
    click("zoom-out", () => this.stage.zoomBy(1 / 1.6));
    click("home", () => this.stage.home());
    click("native", () => this.stage.native());
    click("next-tile", () => this.step(1));
    click("previous-tile", () => this.step(-1));
    click("copy", () => void this.copyLink());
    for (const [id, other] of [["slides", "panel"], ["panel", "slides"]])
      click(`toggle-${id}`, () => {
        document.body.classList.remove(`with-${other}`);
        const open = document.body.classList.toggle(`with-${id}`);
        byId(`toggle-${id}`).setAttribute("aria-expanded", String(open));
        byId(`toggle-${other}`).setAttribute("aria-expanded", "false");
      });
  }

  private makeKeys(): void {
    const keys = new Keys([
      { keys: ["j"], says: "next slide", does: () => this.list.step(1) },
      { keys: ["k"], says: "previous slide", does: () => this.list.step(-1) },
      { keys: ["/"], says: "search slides", does: () => this.list.focusSearch() },
      { keys: ["h"], says: "map on and off", does: () => this.draw({ shown: !this.drawing.shown }) },
      { keys: ["l"], says: "next layer", does: () => this.stepLayer(1) },
      { keys: ["p"], says: "values or percentiles", does: () => this.draw({ percentile: !this.drawing.percentile }) },
      { keys: ["["], says: "map less opaque", does: () => this.draw({ opacity: Math.max(0, this.drawing.opacity - 10) }) },
      { keys: ["]"], says: "map more opaque", does: () => this.draw({ opacity: Math.min(100, this.drawing.opacity + 10) }) },
      { keys: ["t"], says: "most influential tile", does: () => this.choose(this.order[0] ?? -1, { go: true }), inDialog: true },
      { keys: ["n"], says: "next tile by influence", does: () => this.step(1), inDialog: true },
      { keys: ["b"], says: "tile before it", does: () => this.step(-1), inDialog: true },
      { keys: ["Enter"], says: "open the tile", does: () => this.choose(this.stage.chosen, { open: true }) },
      { keys: ["+"], also: ["="], says: "zoom in", does: () => this.stage.zoomBy(1.6) },
      { keys: ["-"], also: ["_"], says: "zoom out", does: () => this.stage.zoomBy(1 / 1.6) },
      { keys: ["1"], says: "own resolution of the slide", does: () => this.stage.native() },
      { keys: ["0", "Home"], says: "whole slide", does: () => this.stage.home() },
      { keys: Object.keys(DIRECTIONS), says: "move", does: (key) => this.stage.panBy(...DIRECTIONS[key]) },
      { keys: ["?"], says: "these keys", does: () => keys.toggleHelp() },
    ]);
  }
}

/** Order tiles by what they do: the largest values first; around 0, the largest absolute ones. */
function influence(values: Float32Array, layer: Layer): number[] {
  const size = (value: number): number => (layer.scale.diverging ? Math.abs(value) : value);
  return Array.from(values.keys()).sort((one, other) => size(values[other]) - size(values[one]) || one - other);
}

async function start(): Promise<void> {
  const message = byId("message");
  // the token, if there was one, is in a cookie by now: it does not belong into links
  history.replaceState(null, "", location.pathname + location.hash);
  try {
    await new Viewer(await fetchCollection()).restore();
  } catch (error) {
    message.textContent = (error as Error).message;
    message.hidden = false;
  }
}

void start();
