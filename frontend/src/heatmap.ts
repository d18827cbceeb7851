// The heatmap: draws coloured tiles and tile outlines over the slide, and finds the tile at a position.

import { NO_TILES, type Colour, type ColourScale, type Tiles } from "./api";

/** From level-0 pixels relative to the corner of the bounds to screen pixels: x * scale + left, y * scale + top. */
export interface ScreenTransform {
  scale: number;
  left: number;
  top: number;
}

const OVERVIEW_TILE_PX = 8; // tiles smaller than this on screen are drawn from the overview
const MAX_OVERVIEW_PX = 4096;

/** All tiles drawn once at a small scale. */
interface Overview {
  canvas: HTMLCanvasElement;
  scale: number;
}

export class Heatmap {
  isVisible = true;
  private tiles: Tiles = NO_TILES;
  private sidePx0 = 0; // of a tile
  private corner = { x: 0, y: 0 }; // of the bounds
  private grid = new Map<number, number[]>(); // grid cell -> tiles whose corner is in it
  // 0 to 1: position on the scale; for a diverging scale the distance from 0
  private strengths: Float32Array = new Float32Array();
  private colourIndices = new Uint8Array();
  private drawOrder = new Uint32Array(); // strongest last, so that they are on top if tiles overlap
  private cssColours: string[] = [];
  private minStrength = 0;
  private overview: Overview | null = null;

  constructor(
    private readonly tileCanvas: HTMLCanvasElement,
    private readonly outlineCanvas: HTMLCanvasElement,
  ) {}

  setTiles(tiles: Tiles, sidePx0: number, corner: { x: number; y: number }): void {
    Object.assign(this, { tiles, sidePx0, corner, grid: new Map() });
    this.drawOrder = new Uint32Array();
    this.overview = null;
    for (let tile = 0; tile < tiles.count; tile++) {
      const cell = this.gridCell(tiles.x[tile], tiles.y[tile]);
      const inCell = this.grid.get(cell);
      if (inCell) inCell.push(tile);
      else this.grid.set(cell, [tile]);
    }
  }

  setValues(values: Float32Array, scale: ColourScale, palette: Colour[]): void {
    const count = values.length;
    this.overview = null;
    this.cssColours = palette.map(([red, green, blue]) => `rgb(${red} ${green} ${blue})`);
    this.colourIndices = new Uint8Array(count);
    this.strengths = new Float32Array(count);
    for (let tile = 0; tile < count; tile++) {
      const fraction = Math.min(1, Math.max(0, (values[tile] - scale.low) / (scale.high - scale.low)));
      this.colourIndices[tile] = Math.round(fraction * (palette.length - 1));
      this.strengths[tile] = scale.diverging ? Math.abs(2 * fraction - 1) : fraction;
    }
    this.drawOrder = new Uint32Array(count).map((_, index) => index);
    this.drawOrder.sort(
      (a, b) => this.strengths[a] - this.strengths[b] || this.colourIndices[a] - this.colourIndices[b],
    );
  }

  /** Hide tiles below a fraction of the colour scale; for a diverging scale, of the absolute value. */
  setMinStrength(fraction: number): void {
    if (fraction !== this.minStrength) this.overview = null;
    this.minStrength = fraction;
  }

  isHidden(tile: number): boolean {
    return this.strengths[tile] < this.minStrength;
  }

  get visibleCount(): number {
    let count = 0;
    for (const strength of this.strengths) if (strength >= this.minStrength) count++;
    return count;
  }

  draw(transform: ScreenTransform, widthPx: number, heightPx: number, pixelRatio: number): void {
    const context = prepareCanvas(this.tileCanvas, widthPx, heightPx, pixelRatio);
    if (!this.isVisible || this.drawOrder.length === 0) return;
    const scale = transform.scale * pixelRatio;
    const left = transform.left * pixelRatio;
    const top = transform.top * pixelRatio;
    if (this.sidePx0 * scale >= OVERVIEW_TILE_PX) {
      this.drawTiles(context, scale, left, top, widthPx * pixelRatio, heightPx * pixelRatio);
      return;
    }
    // Many small tiles are slow to draw one by one, so the overview is drawn once and then scaled.
    const overview = (this.overview ??= this.drawOverview());
    const [width, height] = [overview.canvas.width / overview.scale, overview.canvas.height / overview.scale];
    context.drawImage(overview.canvas, left, top, width * scale, height * scale);
  }

  private drawOverview(): Overview {
    const right = this.tiles.x.reduce((largest, x) => Math.max(largest, x), 0) - this.corner.x + this.sidePx0;
    const bottom = this.tiles.y.reduce((largest, y) => Math.max(largest, y), 0) - this.corner.y + this.sidePx0;
    const scale = Math.min(OVERVIEW_TILE_PX / this.sidePx0, MAX_OVERVIEW_PX / Math.max(right, bottom));
    const canvas = document.createElement("canvas");
    const context = prepareCanvas(canvas, Math.ceil(right * scale), Math.ceil(bottom * scale), 1);
    this.drawTiles(context, scale, 0, 0, canvas.width, canvas.height);
    return { canvas, scale };
  }

  /** Draw the tiles that are inside the canvas. Lengths are canvas pixels. */
  private drawTiles(
    context: CanvasRenderingContext2D,
    scale: number,
    left: number,
    top: number,
    width: number,
    height: number,
  ): void {
    // Tile positions are rounded, so neighbours can be one level-0 pixel apart. One extra pixel hides such gaps.
    const side = (this.sidePx0 + (scale < 1 ? 1 : 0)) * scale;
    let currentColour = -1;
    for (const tile of this.drawOrder) {
      if (this.strengths[tile] < this.minStrength) continue;
      const x = (this.tiles.x[tile] - this.corner.x) * scale + left;
      const y = (this.tiles.y[tile] - this.corner.y) * scale + top;
      if (x > width || y > height || x + side < 0 || y + side < 0) continue;
      if (currentColour !== this.colourIndices[tile]) {
        currentColour = this.colourIndices[tile];
        context.fillStyle = this.cssColours[currentColour];
      }
      // Edges are rounded to whole pixels, so that there are no seams between neighbours.
      const [leftEdge, topEdge] = [Math.round(x), Math.round(y)];
      const tileWidth = Math.max(1, Math.round(x + side) - leftEdge);
      const tileHeight = Math.max(1, Math.round(y + side) - topEdge);
      context.fillRect(leftEdge, topEdge, tileWidth, tileHeight);
    }
  }

  /** Draw the outlines of the hovered and the selected tile; -1 means no tile. */
  drawOutlines(
    transform: ScreenTransform | null,
    widthPx: number,
    heightPx: number,
    pixelRatio: number,
    hoveredTile: number,
    selectedTile: number,
  ): void {
    const context = prepareCanvas(this.outlineCanvas, widthPx, heightPx, pixelRatio);
    const outlines = [
      { tile: hoveredTile, lineWidth: 1.5, colour: "#fff" },
      { tile: selectedTile, lineWidth: 3, colour: "#ffdf3d" },
    ];
    for (const { tile, lineWidth, colour } of outlines) {
      if (transform === null || tile < 0 || tile >= this.tiles.count) continue;
      const x = ((this.tiles.x[tile] - this.corner.x) * transform.scale + transform.left) * pixelRatio;
      const y = ((this.tiles.y[tile] - this.corner.y) * transform.scale + transform.top) * pixelRatio;
      const side = Math.max(4 * pixelRatio, this.sidePx0 * transform.scale * pixelRatio);
      // A light line on a wider dark one is visible on every background.
      for (const [strokeStyle, extraWidth] of [["rgb(0 0 0 / 0.75)", 2], [colour, 0]] as const) {
        context.strokeStyle = strokeStyle;
        context.lineWidth = (lineWidth + extraWidth) * pixelRatio;
        context.strokeRect(x, y, side, side);
      }
    }
  }

  /** Return the tile at a level-0 position, or -1. If tiles overlap, return the one with the nearest centre. */
  tileAt(xPx0: number, yPx0: number): number {
    let nearestTile = -1;
    let smallestDistance = Infinity;
    if (this.sidePx0 <= 0) return nearestTile;
    for (const dx of [-1, 0])
      for (const dy of [-1, 0])
        for (const tile of this.grid.get(this.gridCell(xPx0 + dx * this.sidePx0, yPx0 + dy * this.sidePx0)) ?? []) {
          const x = xPx0 - this.tiles.x[tile];
          const y = yPx0 - this.tiles.y[tile];
          if (x < 0 || y < 0 || x >= this.sidePx0 || y >= this.sidePx0) continue;
          const distance = Math.hypot(x - this.sidePx0 / 2, y - this.sidePx0 / 2);
          if (distance < smallestDistance) [nearestTile, smallestDistance] = [tile, distance];
        }
    return nearestTile;
  }

  private gridCell(x: number, y: number): number {
    return Math.floor(y / this.sidePx0) * 1_000_003 + Math.floor(x / this.sidePx0);
  }
}

/** Set the size of a canvas and clear it. */
function prepareCanvas(
  canvas: HTMLCanvasElement,
  widthPx: number,
  heightPx: number,
  pixelRatio: number,
): CanvasRenderingContext2D {
  const width = Math.round(widthPx * pixelRatio);
  const height = Math.round(heightPx * pixelRatio);
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  const context = canvas.getContext("2d");
  if (context === null) throw new Error("This browser does not support drawing on a canvas.");
  context.clearRect(0, 0, width, height);
  return context;
}
