// What the server tells: see src/tapfm/viewer/server.py.

export interface Said {
  logit: number;
  probability: number;
  threshold: number | null;
  call: 0 | 1 | null;
  label: 0 | 1 | null;
  constant: number | null;
}

export interface SlideLine {
  key: string;
  slide_id: string;
  has_file: boolean;
  patient_id: string | null;
  cohort: string | null;
  split: string | null;
  tiles: number | null;
  tiles_failed: number | null;
  targets: Record<string, Said>;
}

export interface Scale {
  low: number;
  high: number;
  unit: string;
  diverging: boolean;
  ticks: number[];
}

export interface Layer {
  column: string;
  kind: "attention" | "weight" | "contribution" | "score";
  target: string | null;
  title: string;
  scale: Scale;
  percentile_scale: Scale;
}

export interface Slide extends SlideLine {
  width_px0: number;
  height_px0: number;
  bounds: { x_px0: number; y_px0: number; width_px0: number; height_px0: number };
  last_level: number;
  picture_px: number;
  mpp: number | null;
  format: string | null;
  side_px0: number | null;
  tile_px: number | null;
  layers: Layer[];
  notes: string[];
}

export type Colour = [number, number, number];

export interface Collection {
  version: string;
  targets: string[];
  palettes: { sequential: Colour[]; diverging: Colour[] };
  slides: SlideLine[];
}

/** The tiles of a slide; positions are level-0 pixels, padding outside the bounds included. */
export interface Tiles {
  count: number;
  x: Int32Array;
  y: Int32Array;
  values: Map<string, Float32Array>;
  percentiles: Map<string, Float32Array>;
}

export const NO_TILES: Tiles = {
  count: 0,
  x: new Int32Array(),
  y: new Int32Array(),
  values: new Map(),
  percentiles: new Map(),
};

async function ask(path: string): Promise<Response> {
  let answer: Response;
  try {
    answer = await fetch(path);
  } catch {
    throw new Error("The server does not answer: is tapfm view still running?");
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  throw new Error(told.error ?? `The server answered ${answer.status}.`);
}

export const fetchCollection = async (): Promise<Collection> => (await ask("api/collection")).json();

export const fetchSlide = async (key: string): Promise<Slide> => (await ask(`api/slides/${key}`)).json();

export async function fetchTiles(key: string): Promise<Tiles> {
  return unpack(await (await ask(`api/slides/${key}/numbers`)).arrayBuffer());
}

export const thumbnailOf = (key: string): string => `api/slides/${key}/thumbnail.jpeg`;

export const tilePictureOf = (key: string, tile: number): string => `api/slides/${key}/tiles/${tile}.jpeg`;

export const pictureOf = (key: string, level: number, column: number, row: number): string =>
  `api/slides/${key}/pictures/${level}/${column}_${row}.jpeg`;

/** Read the block of numbers: its layout is told in src/tapfm/viewer/tile_numbers.py. */
export function unpack(block: ArrayBuffer): Tiles {
  const length = new DataView(block).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(block, 4, length)));
  const count: number = header.count;
  const tiles: Tiles = { ...NO_TILES, count, values: new Map(), percentiles: new Map() };
  let offset = Math.ceil((4 + length) / 4) * 4;
  for (const name of header.columns as string[]) {
    if (name === "x" || name === "y") tiles[name] = new Int32Array(block, offset, count);
    else {
      const percentile = name.startsWith("percentile.");
      const column = percentile ? name.slice("percentile.".length) : name;
      (percentile ? tiles.percentiles : tiles.values).set(column, new Float32Array(block, offset, count));
    }
    offset += 4 * count;
  }
  return tiles;
}
