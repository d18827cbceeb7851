// The slide itself: OpenSeadragon, with the map laid exactly over it, and a scale bar.

import OpenSeadragon from "openseadragon";
import { pictureOf, type Slide } from "./api";
import { HeatMap, type Placing } from "./heatmap";
import { lengthOf, roundBelow } from "./numbers";
import { byId } from "./page";

const MOST_BAR_PX = 150;
const BLANK = "data:image/gif;base64,R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs=";

export interface Place {
  x: number; // centre, level-0 pixels, padding outside the bounds included
  y: number;
  zoom: number; // pixels of the screen for each level-0 pixel
}

/**
 * OpenSeadragon adds an inline style, which the server forbids to all pages, unless it finds an element of that name.
 * This one is no style to a browser; the rule itself is in style.css.
 */
function forgoInlineStyle(): void {
  const standIn = document.createElementNS("urn:tapfm", "style");
  standIn.setAttribute("data-openseadragon-mobile-css", "true");
  document.head.append(standIn);
}

/** OpenSeadragon warns of pictures that come after their slide was left: that is what stepping through slides does. */
function forgoWarnings(): void {
  const warn = (text: unknown, ...more: unknown[]): void => {
    if (!String(text).startsWith("Ignoring tile")) console.warn(text, ...more);
  };
  Object.assign(OpenSeadragon, { console: { ...console, warn } });
}

export class Stage {
  readonly map: HeatMap;
  hovered = -1;
  chosen = -1;
  onMoved: () => void = () => {};
  onHover: (tile: number, x: number, y: number) => void = () => {};
  onClick: (tile: number) => void = () => {};
  onBroken: () => void = () => {};
  private readonly viewer: OpenSeadragon.Viewer;
  private readonly element = byId("picture");
  private readonly squares = document.createElement("canvas");
  private slide: Slide | null = null;
  private wanted: Place | null = null;
  private size = { x: 1, y: 1 }; // of the window that OpenSeadragon knows: its own view is right for this one only

  constructor() {
    forgoInlineStyle();
    forgoWarnings();
    this.viewer = OpenSeadragon({
      element: this.element,
      drawer: "canvas", // needs no GPU: fluid on remote desktops too
      showNavigationControl: false, // the page has its own buttons
      showNavigator: true,
      navigatorPosition: "BOTTOM_RIGHT",
      navigatorSizeRatio: 0.16,
      navigatorOpacity: 1,
      navigatorBackground: "var(--ground)",
      navigatorBorderColor: "var(--line)",
      navigatorDisplayRegionColor: "#d4421e",
      gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: false },
      gestureSettingsTouch: { clickToZoom: false, dblClickToZoom: false, flickEnabled: true },
      animationTime: 0.5,
      springStiffness: 8,
      zoomPerScroll: 1.25,
      maxZoomPixelRatio: 8,
      minZoomImageRatio: 0.7,
      visibilityRatio: 0.3,
      imageLoaderLimit: 6,
      maxImageCacheCount: 400,
      preload: true,
      imageSmoothingEnabled: true,
    });
    const marks = document.createElement("canvas");
    for (const canvas of [this.squares, marks]) {
      canvas.className = "over";
      canvas.setAttribute("aria-hidden", "true");
      this.viewer.canvas.append(canvas);
    }
    this.squares.id = "heatmap";
    this.map = new HeatMap(this.squares, marks);
    this.viewer.addHandler("open", () => this.opened());
    this.viewer.addHandler("update-viewport", () => this.redraw());
    this.viewer.addHandler("animation-finish", () => this.onMoved());
    this.viewer.addHandler("resize", (event) => this.resized(event.newContainerSize));
    this.viewer.addHandler("tile-load-failed", () => this.onBroken());
    this.viewer.addHandler("canvas-key", (event) => (event.preventDefaultAction = true)); // see keys.ts
    this.viewer.addHandler("canvas-click", (event) => {
      if (event.quick) this.onClick(this.tileAt(event.position));
    });
    this.viewer.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.viewer.canvas.addEventListener("pointerleave", () => this.hoverOver(-1, 0, 0));
    this.viewer.canvas.setAttribute("aria-label", "Slide");
  }

  open(slide: Slide, place: Place | null): void {
    this.slide = slide;
    this.wanted = place;
    this.hovered = this.chosen = -1;
    this.viewer.open({
      width: slide.bounds.width_px0,
      height: slide.bounds.height_px0,
      tileSize: slide.picture_px,
      minLevel: 0,
      maxLevel: slide.last_level,
      getTileUrl: (level: number, column: number, row: number) =>
        slide.has_file ? pictureOf(slide.key, level, column, row) : BLANK,
    } as unknown as OpenSeadragon.TileSourceSpecifier);
  }

  close(): void {
    this.slide = null;
    this.viewer.close();
    this.redraw();
  }

  set opacity(part: number) {
    // of the whole canvas: squares that overlap do not add up
    this.squares.style.opacity = String(part);
  }

  get place(): Place | null {
    if (!this.slide || !this.viewer.isOpen()) return null;
    const { x_px0, y_px0, width_px0 } = this.slide.bounds;
    const centre = this.viewer.viewport.getCenter(false);
    const zoom = (this.viewer.viewport.getZoom(false) * this.size.x) / width_px0;
    return { x: centre.x * width_px0 + x_px0, y: centre.y * width_px0 + y_px0, zoom };
  }

  go(place: Place, immediately = false): void {
    if (!this.slide || !this.viewer.isOpen()) {
      this.wanted = place;
      return;
    }
    const { x_px0, y_px0, width_px0 } = this.slide.bounds;
    const viewport = this.viewer.viewport;
    const centre = new OpenSeadragon.Point((place.x - x_px0) / width_px0, (place.y - y_px0) / width_px0);
    viewport.zoomTo((place.zoom * width_px0) / this.size.x, undefined, immediately);
    viewport.panTo(centre, immediately);
    viewport.applyConstraints(immediately);
  }

  /** Bring a tile to the middle; come nearer where it is too small to be looked at. */
  goToTile(xPx0: number, yPx0: number, sidePx0: number): void {
    const window = Math.min(this.width, this.height);
    const now = this.place?.zoom ?? 0;
    const part = (now * sidePx0) / window; // of the window that the tile takes
    const zoom = part < 0.12 || part > 1 ? window / (5 * sidePx0) : now;
    this.go({ x: xPx0 + sidePx0 / 2, y: yPx0 + sidePx0 / 2, zoom });
  }

  zoomBy(factor: number): void {
    if (!this.viewer.isOpen()) return;
    this.viewer.viewport.zoomBy(factor);
    this.viewer.viewport.applyConstraints();
  }

  panBy(partX: number, partY: number): void {
    if (!this.viewer.isOpen()) return;
    const bounds = this.viewer.viewport.getBounds();
    this.viewer.viewport.panBy(new OpenSeadragon.Point(partX * bounds.width, partY * bounds.height));
    this.viewer.viewport.applyConstraints();
  }

  home(): void {
    if (this.viewer.isOpen()) this.viewer.viewport.goHome();
  }

  native(): void {
    const place = this.place;
    if (place) this.go({ ...place, zoom: 1 });
  }

  redraw(): void {
    const ratio = window.devicePixelRatio || 1;
    const placing = this.placing();
    this.map.draw(placing ?? { scale: 0, left: -1e6, top: -1e6 }, this.width, this.height, ratio);
    this.redrawMarks();
    this.drawScaleBar(placing);
  }

  redrawMarks(): void {
    const placing = this.placing();
    const ratio = window.devicePixelRatio || 1;
    this.map.drawMarks(placing, this.width, this.height, ratio, this.hovered, this.chosen);
  }

  /** Keep place and magnification in a window of another size; OpenSeadragon itself would zoom along. */
  private resized(size: { x: number; y: number }): void {
    const place = this.place;
    const bounds = this.slide?.bounds;
    const fits = (length_px0: number, window: number): boolean => length_px0 * (place?.zoom ?? 0) < window + 1;
    const whole = bounds !== undefined && fits(bounds.width_px0, this.size.x) && fits(bounds.height_px0, this.size.y);
    this.size = { x: size.x, y: size.y };
    requestAnimationFrame(() => {
      if (whole && this.viewer.isOpen()) this.viewer.viewport.goHome(true);
      else if (place) this.go(place, true);
      this.redraw();
      this.onMoved();
    });
  }

  private opened(): void {
    this.size = this.viewer.viewport.getContainerSize();
    if (this.wanted) this.go(this.wanted, true);
    this.wanted = null;
    this.redraw();
    this.onMoved();
  }

  private get width(): number {
    return this.element.clientWidth || 1;
  }

  private get height(): number {
    return this.element.clientHeight || 1;
  }

  private placing(): Placing | null {
    if (!this.slide || !this.viewer.isOpen()) return null;
    const corner = this.viewer.viewport.pixelFromPoint(new OpenSeadragon.Point(0, 0), true);
    const end = this.viewer.viewport.pixelFromPoint(new OpenSeadragon.Point(1, 0), true);
    return { scale: (end.x - corner.x) / this.slide.bounds.width_px0, left: corner.x, top: corner.y };
  }

  private tileAt(position: { x: number; y: number }): number {
    const placing = this.placing();
    if (!this.slide || placing === null) return -1;
    const x = (position.x - placing.left) / placing.scale + this.slide.bounds.x_px0;
    const y = (position.y - placing.top) / placing.scale + this.slide.bounds.y_px0;
    return this.map.at(x, y);
  }

  private hover(event: PointerEvent): void {
    if (event.pointerType === "touch" || event.buttons !== 0) return this.hoverOver(-1, 0, 0);
    const frame = this.element.getBoundingClientRect();
    const position = { x: event.clientX - frame.left, y: event.clientY - frame.top };
    const overSlide = !(event.target as Element).closest(".navigator");
    this.hoverOver(overSlide ? this.tileAt(position) : -1, position.x, position.y);
  }

  private hoverOver(tile: number, x: number, y: number): void {
    if (tile !== this.hovered) {
      this.hovered = tile;
      this.redrawMarks();
    }
    this.onHover(tile, x, y);
  }

  private drawScaleBar(placing: Placing | null): void {
    byId("scale").hidden = placing === null;
    if (placing === null || !this.slide) return;
    const { mpp } = this.slide;
    const perPx = (mpp ?? 1) / placing.scale;
    const length = roundBelow(MOST_BAR_PX * perPx);
    byId("bar").style.width = `${length / perPx}px`;
    const um = length >= 1000 ? `${length / 1000} mm` : `${Number(length.toPrecision(3))} \u00b5m`;
    byId("length").textContent = mpp === null ? lengthOf(length, null) : um;
    const power = mpp === null ? null : (10 / mpp) * placing.scale;
    byId("magnification").textContent = power === null ? "" : `${power >= 10 ? Math.round(power) : power.toFixed(1)}\u00d7`;
  }
}
