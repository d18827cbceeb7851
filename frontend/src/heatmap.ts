// Squares of tiles over the slide, in the colours of their numbers; and which tile is under the pointer.

import { NO_TILES, type Colour, type Scale, type Tiles } from "./api";

/** From pixels of level 0, counted from the corner of the bounds, to pixels of the screen: x * scale + left. */
export interface Placing {
  scale: number;
  left: number;
  top: number;
}

const SHEET_TILE_PX = 8; // squares smaller than this come from a sheet
const MOST_SHEET_PX = 4096;

export class HeatMap {
  shown = true;
  private tiles: Tiles = NO_TILES;
  private sidePx0 = 0;
  private corner = { x: 0, y: 0 };
  private cells = new Map<number, number[]>();
  private strength: Float32Array = new Float32Array(); // 0 to 1: what hiding goes by
  private colour = new Uint8Array();
  private order = new Uint32Array(); // the strongest last, so that they lie on top where tiles overlap
  private css: string[] = [];
  private hideBelow = 0;
  private sheet: { canvas: HTMLCanvasElement; scale: number } | null = null;

  constructor(
    private readonly squares: HTMLCanvasElement,
    private readonly marks: HTMLCanvasElement,
  ) {}

  setTiles(tiles: Tiles, sidePx0: number, corner: { x: number; y: number }): void {
    Object.assign(this, { tiles, sidePx0, corner, cells: new Map() });
    this.order = new Uint32Array();
    this.sheet = null;
    for (let tile = 0; tile < tiles.count; tile++) {
      const cell = this.cellOf(tiles.x[tile], tiles.y[tile]);
      const inside = this.cells.get(cell);
      if (inside) inside.push(tile);
      else this.cells.set(cell, [tile]);
    }
  }

  setValues(values: Float32Array, scale: Scale, palette: Colour[]): void {
    const count = values.length;
    this.sheet = null;
    this.css = palette.map(([red, green, blue]) => `rgb(${red} ${green} ${blue})`);
    this.colour = new Uint8Array(count);
    this.strength = new Float32Array(count);
    for (let tile = 0; tile < count; tile++) {
      const place = Math.min(1, Math.max(0, (values[tile] - scale.low) / (scale.high - scale.low)));
      this.colour[tile] = Math.round(place * (palette.length - 1));
      this.strength[tile] = scale.diverging ? Math.abs(2 * place - 1) : place;
    }
    this.order = new Uint32Array(count).map((_, index) => index);
    this.order.sort((one, other) => this.strength[one] - this.strength[other] || this.colour[one] - this.colour[other]);
  }

  /** Hide tiles below a part of the scale; of a scale around 0, by the absolute value. */
  setHiding(part: number): void {
    if (part !== this.hideBelow) this.sheet = null;
    this.hideBelow = part;
  }

  isHidden(tile: number): boolean {
    return this.strength[tile] < this.hideBelow;
  }

  get visibleCount(): number {
    let count = 0;
    for (const strength of this.strength) if (strength >= this.hideBelow) count++;
    return count;
  }

  draw(placing: Placing, widthPx: number, heightPx: number, ratio: number): void {
    const context = sized(this.squares, widthPx, heightPx, ratio);
    if (!this.shown || this.order.length === 0) return;
    const scale = placing.scale * ratio;
    const left = placing.left * ratio;
    const top = placing.top * ratio;
    if (this.sidePx0 * scale >= SHEET_TILE_PX) {
      this.paint(context, scale, left, top, widthPx * ratio, heightPx * ratio);
      return;
    }
    // small squares are many: painted once, and then moved and shrunk as one picture
    const sheet = (this.sheet ??= this.paintSheet());
    const [width, height] = [sheet.canvas.width / sheet.scale, sheet.canvas.height / sheet.scale];
    context.drawImage(sheet.canvas, left, top, width * scale, height * scale);
  }

  private paintSheet(): { canvas: HTMLCanvasElement; scale: number } {
    const right = this.tiles.x.reduce((most, x) => Math.max(most, x), 0) - this.corner.x + this.sidePx0;
    const bottom = this.tiles.y.reduce((most, y) => Math.max(most, y), 0) - this.corner.y + this.sidePx0;
    const scale = Math.min(SHEET_TILE_PX / this.sidePx0, MOST_SHEET_PX / Math.max(right, bottom));
    const canvas = document.createElement("canvas");
    const context = sized(canvas, Math.ceil(right * scale), Math.ceil(bottom * scale), 1);
    this.paint(context, scale, 0, 0, canvas.width, canvas.height);
    return { canvas, scale };
  }

  /** Paint the squares that can be seen; lengths are pixels of the canvas. */
  private paint(
    context: CanvasRenderingContext2D,
    scale: number,
    left: number,
    top: number,
    width: number,
    height: number,
  ): void {
    // Tiles lie up to one pixel of level 0 apart, as their positions are rounded: from afar that is no gap to be seen.
    const side = (this.sidePx0 + (scale < 1 ? 1 : 0)) * scale;
    let painted = -1;
    for (const tile of this.order) {
      if (this.strength[tile] < this.hideBelow) continue;
      const x = (this.tiles.x[tile] - this.corner.x) * scale + left;
      const y = (this.tiles.y[tile] - this.corner.y) * scale + top;
      if (x > width || y > height || x + side < 0 || y + side < 0) continue;
      if (painted !== this.colour[tile]) {
        painted = this.colour[tile];
        context.fillStyle = this.css[painted];
      }
      // edges on whole pixels: neighbours meet without a seam
      const [from, upper] = [Math.round(x), Math.round(y)];
      context.fillRect(from, upper, Math.max(1, Math.round(x + side) - from), Math.max(1, Math.round(y + side) - upper));
    }
  }

  drawMarks(placing: Placing | null, widthPx: number, heightPx: number, ratio: number, hovered: number, chosen: number): void {
    const context = sized(this.marks, widthPx, heightPx, ratio);
    for (const [tile, width] of [[hovered, 1.5], [chosen, 3]] as const) {
      if (placing === null || tile < 0 || tile >= this.tiles.count) continue;
      const x = ((this.tiles.x[tile] - this.corner.x) * placing.scale + placing.left) * ratio;
      const y = ((this.tiles.y[tile] - this.corner.y) * placing.scale + placing.top) * ratio;
      const side = Math.max(4 * ratio, this.sidePx0 * placing.scale * ratio);
      // dark around light: seen on every tissue and every colour
      for (const [colour, more] of [["rgb(0 0 0 / 0.75)", 2], [width > 2 ? "#ffdf3d" : "#fff", 0]] as const) {
        context.strokeStyle = colour;
        context.lineWidth = (width + more) * ratio;
        context.strokeRect(x, y, side, side);
      }
    }
  }

  /** Find the tile at a point of level 0; where tiles overlap, the one whose centre is nearest. */
  at(xPx0: number, yPx0: number): number {
    let best = -1;
    let nearest = Infinity;
    if (this.sidePx0 <= 0) return best;
    for (const dx of [-1, 0])
      for (const dy of [-1, 0])
        for (const tile of this.cells.get(this.cellOf(xPx0 + dx * this.sidePx0, yPx0 + dy * this.sidePx0)) ?? []) {
          const x = xPx0 - this.tiles.x[tile];
          const y = yPx0 - this.tiles.y[tile];
          if (x < 0 || y < 0 || x >= this.sidePx0 || y >= this.sidePx0) continue;
          const distance = Math.hypot(x - this.sidePx0 / 2, y - this.sidePx0 / 2);
          if (distance < nearest) [best, nearest] = [tile, distance];
        }
    return best;
  }

  private cellOf(x: number, y: number): number {
    return Math.floor(y / this.sidePx0) * 1_000_003 + Math.floor(x / this.sidePx0);
  }
}

function sized(canvas: HTMLCanvasElement, widthPx: number, heightPx: number, ratio: number): CanvasRenderingContext2D {
  const width = Math.round(widthPx * ratio);
  const height = Math.round(heightPx * ratio);
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  const context = canvas.getContext("2d");
  if (context === null) throw new Error("This browser cannot draw.");
  context.clearRect(0, 0, width, height);
  return context;
}
