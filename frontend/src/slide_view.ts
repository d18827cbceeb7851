// The slide in OpenSeadragon, with the heatmap over it and a scale bar.

import OpenSeadragon from "openseadragon";
import { pyramidImageUrl, type Slide } from "./api";
import { getElement } from "./dom";
import { formatLength, roundDown } from "./formatting";
import { Heatmap, type ScreenTransform } from "./heatmap";

const MAX_SCALE_BAR_PX = 150;
const BLANK_IMAGE = "data:image/gif;base64,R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs=";
const NO_TILE = -1;

export interface ViewPosition {
  x: number; // centre, level-0 pixels from the corner of the slide, not of its bounds
  y: number;
  zoom: number; // screen pixels per level-0 pixel
}

/**
 * Prevent OpenSeadragon from adding an inline style, which the server's Content-Security-Policy forbids. It adds none
 * if an element with this attribute exists. Browsers ignore the element because of its namespace; style.css contains
 * the rule.
 */
function preventInlineStyle(): void {
  const placeholder = document.createElementNS("urn:tapfm", "style");
  placeholder.setAttribute("data-openseadragon-mobile-css", "true");
  document.head.append(placeholder);
}

/** Silence OpenSeadragon's warnings about images that arrive after the user has left their slide. */
function silenceLateImageWarnings(): void {
  const warn = (text: unknown, ...more: unknown[]): void => {
    if (!String(text).startsWith("Ignoring tile")) console.warn(text, ...more);
  };
  Object.assign(OpenSeadragon, { console: { ...console, warn } });
}

export class SlideView {
  readonly heatmap: Heatmap;
  hoveredTile = NO_TILE;
  selectedTile = NO_TILE;
  onMove: () => void = () => {};
  onHover: (tile: number, x: number, y: number) => void = () => {};
  onClick: (tile: number) => void = () => {};
  onImageError: () => void = () => {};
  private readonly viewer: OpenSeadragon.Viewer;
  private readonly element = getElement("slide-image");
  private readonly tileCanvas = document.createElement("canvas");
  private slide: Slide | null = null;
  private initialPosition: ViewPosition | null = null; // position to move to when the slide has been opened
  private size = { x: 1, y: 1 }; // size of the container for which OpenSeadragon computed its current zoom

  constructor() {
    preventInlineStyle();
    silenceLateImageWarnings();
    this.viewer = OpenSeadragon({
      element: this.element,
      drawer: "canvas", // needs no GPU, so it is also fast on remote desktops
      showNavigationControl: false, // the page has its own buttons
      showNavigator: true,
      navigatorPosition: "BOTTOM_RIGHT",
      navigatorSizeRatio: 0.16,
      navigatorOpacity: 1,
      navigatorBackground: "var(--background)",
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
    const outlineCanvas = document.createElement("canvas");
    for (const canvas of [this.tileCanvas, outlineCanvas]) {
      canvas.className = "overlay";
      canvas.setAttribute("aria-hidden", "true");
      this.viewer.canvas.append(canvas);
    }
    this.tileCanvas.id = "heatmap";
    this.heatmap = new Heatmap(this.tileCanvas, outlineCanvas);
    this.viewer.addHandler("open", () => this.handleOpen());
    this.viewer.addHandler("update-viewport", () => this.redraw());
    this.viewer.addHandler("animation-finish", () => this.onMove());
    this.viewer.addHandler("resize", (event) => this.handleResize(event.newContainerSize));
    this.viewer.addHandler("tile-load-failed", () => this.onImageError());
    this.viewer.addHandler("canvas-key", (event) => (event.preventDefaultAction = true)); // see shortcuts.ts
    this.viewer.addHandler("canvas-click", (event) => {
      if (event.quick) this.onClick(this.tileAt(event.position));
    });
    this.viewer.canvas.addEventListener("pointermove", (event) => this.handlePointerMove(event));
    this.viewer.canvas.addEventListener("pointerleave", () => this.setHoveredTile(NO_TILE, 0, 0));
    this.viewer.canvas.setAttribute("aria-label", "Slide");
  }

  open(slide: Slide, position: ViewPosition | null): void {
    this.slide = slide;
    this.initialPosition = position;
    this.hoveredTile = this.selectedTile = NO_TILE;
    this.viewer.open({
      width: slide.bounds.width_px0,
      height: slide.bounds.height_px0,
      tileSize: slide.image_px,
      minLevel: 0,
      maxLevel: slide.last_level,
      getTileUrl: (level: number, column: number, row: number) =>
        slide.has_file ? pyramidImageUrl(slide.key, level, column, row) : BLANK_IMAGE,
    } as unknown as OpenSeadragon.TileSourceSpecifier);
  }

  close(): void {
    this.slide = null;
    this.viewer.close();
    this.redraw();
  }

  set opacity(fraction: number) {
    // Set on the whole canvas, so that overlapping tiles do not add up.
    this.tileCanvas.style.opacity = String(fraction);
  }

  get position(): ViewPosition | null {
    if (!this.slide || !this.viewer.isOpen()) return null;
    const { x_px0, y_px0, width_px0 } = this.slide.bounds;
    const centre = this.viewer.viewport.getCenter(false);
    const zoom = (this.viewer.viewport.getZoom(false) * this.size.x) / width_px0;
    return { x: centre.x * width_px0 + x_px0, y: centre.y * width_px0 + y_px0, zoom };
  }

  moveTo(position: ViewPosition, immediately = false): void {
    if (!this.slide || !this.viewer.isOpen()) {
      this.initialPosition = position;
      return;
    }
    const { x_px0, y_px0, width_px0 } = this.slide.bounds;
    const viewport = this.viewer.viewport;
    const centre = new OpenSeadragon.Point((position.x - x_px0) / width_px0, (position.y - y_px0) / width_px0);
    viewport.zoomTo((position.zoom * width_px0) / this.size.x, undefined, immediately);
    viewport.panTo(centre, immediately);
    viewport.applyConstraints(immediately);
  }

  /** Centre a tile, and change the zoom if the tile would be very small or larger than the window. */
  moveToTile(xPx0: number, yPx0: number, sidePx0: number): void {
    const windowPx = Math.min(this.width, this.height);
    const currentZoom = this.position?.zoom ?? 0;
    const coveredFraction = (currentZoom * sidePx0) / windowPx; // of the window, by the tile
    const zoom = coveredFraction < 0.12 || coveredFraction > 1 ? windowPx / (5 * sidePx0) : currentZoom;
    this.moveTo({ x: xPx0 + sidePx0 / 2, y: yPx0 + sidePx0 / 2, zoom });
  }

  zoomBy(factor: number): void {
    if (!this.viewer.isOpen()) return;
    this.viewer.viewport.zoomBy(factor);
    this.viewer.viewport.applyConstraints();
  }

  /** Pan by fractions of the window. */
  panBy(fractionX: number, fractionY: number): void {
    if (!this.viewer.isOpen()) return;
    const bounds = this.viewer.viewport.getBounds();
    this.viewer.viewport.panBy(new OpenSeadragon.Point(fractionX * bounds.width, fractionY * bounds.height));
    this.viewer.viewport.applyConstraints();
  }

  showWholeSlide(): void {
    if (this.viewer.isOpen()) this.viewer.viewport.goHome();
  }

  showFullResolution(): void {
    const position = this.position;
    if (position) this.moveTo({ ...position, zoom: 1 });
  }

  redraw(): void {
    const pixelRatio = window.devicePixelRatio || 1;
    const transform = this.screenTransform();
    this.heatmap.draw(transform ?? { scale: 0, left: -1e6, top: -1e6 }, this.width, this.height, pixelRatio);
    this.redrawOutlines();
    this.drawScaleBar(transform);
  }

  redrawOutlines(): void {
    const transform = this.screenTransform();
    const pixelRatio = window.devicePixelRatio || 1;
    this.heatmap.drawOutlines(transform, this.width, this.height, pixelRatio, this.hoveredTile, this.selectedTile);
  }

  /** Keep position and zoom when the window is resized. By default OpenSeadragon would change the zoom. */
  private handleResize(size: { x: number; y: number }): void {
    const position = this.position;
    const bounds = this.slide?.bounds;
    const fits = (lengthPx0: number, windowPx: number): boolean => lengthPx0 * (position?.zoom ?? 0) < windowPx + 1;
    const isWholeSlide =
      bounds !== undefined && fits(bounds.width_px0, this.size.x) && fits(bounds.height_px0, this.size.y);
    this.size = { x: size.x, y: size.y };
    requestAnimationFrame(() => {
      if (isWholeSlide && this.viewer.isOpen()) this.viewer.viewport.goHome(true);
      else if (position) this.moveTo(position, true);
      this.redraw();
      this.onMove();
    });
  }

  private handleOpen(): void {
    this.size = this.viewer.viewport.getContainerSize();
    if (this.initialPosition) this.moveTo(this.initialPosition, true);
    this.initialPosition = null;
    this.redraw();
    this.onMove();
  }

  private get width(): number {
    return this.element.clientWidth || 1;
  }

  private get height(): number {
    return this.element.clientHeight || 1;
  }

  private screenTransform(): ScreenTransform | null {
    if (!this.slide || !this.viewer.isOpen()) return null;
    const corner = this.viewer.viewport.pixelFromPoint(new OpenSeadragon.Point(0, 0), true);
    const end = this.viewer.viewport.pixelFromPoint(new OpenSeadragon.Point(1, 0), true);
    return { scale: (end.x - corner.x) / this.slide.bounds.width_px0, left: corner.x, top: corner.y };
  }

  private tileAt(screen: { x: number; y: number }): number {
    const transform = this.screenTransform();
    if (!this.slide || transform === null) return NO_TILE;
    const x = (screen.x - transform.left) / transform.scale + this.slide.bounds.x_px0;
    const y = (screen.y - transform.top) / transform.scale + this.slide.bounds.y_px0;
    return this.heatmap.tileAt(x, y);
  }

  private handlePointerMove(event: PointerEvent): void {
    if (event.pointerType === "touch" || event.buttons !== 0) return this.setHoveredTile(NO_TILE, 0, 0);
    const frame = this.element.getBoundingClientRect();
    const screen = { x: event.clientX - frame.left, y: event.clientY - frame.top };
    const isOverSlide = !(event.target as Element).closest(".navigator");
    this.setHoveredTile(isOverSlide ? this.tileAt(screen) : NO_TILE, screen.x, screen.y);
  }

  private setHoveredTile(tile: number, x: number, y: number): void {
    if (tile !== this.hoveredTile) {
      this.hoveredTile = tile;
      this.redrawOutlines();
    }
    this.onHover(tile, x, y);
  }

  private drawScaleBar(transform: ScreenTransform | null): void {
    getElement("scale-bar").hidden = transform === null;
    if (transform === null || !this.slide) return;
    const { mpp } = this.slide;
    const lengthPerPx = (mpp ?? 1) / transform.scale; // µm, or level-0 pixels if mpp is unknown
    const length = roundDown(MAX_SCALE_BAR_PX * lengthPerPx);
    getElement("scale-bar-line").style.width = `${length / lengthPerPx}px`;
    const metric = length >= 1000 ? `${length / 1000} mm` : `${Number(length.toPrecision(3))} \u00b5m`;
    getElement("scale-bar-length").textContent = mpp === null ? formatLength(length, null) : metric;
    const magnification = mpp === null ? null : (10 / mpp) * transform.scale;
    const rounded = magnification !== null && magnification >= 10 ? Math.round(magnification) : magnification?.toFixed(1);
    getElement("magnification").textContent = magnification === null ? "" : `${rounded}\u00d7`;
  }
}
