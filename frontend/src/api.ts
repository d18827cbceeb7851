// Requests to the server and the types of its responses, see src/tapfm/viewer/app.py.

export interface TargetPrediction {
  logit: number;
  probability: number;
  threshold: number | null;
  call: 0 | 1 | null;
  label: 0 | 1 | null;
  call_name: string; // class of the call, such as "positive" or "MUT"; empty without a call
  label_name: string; // class of the label; empty without a label
  constant: number | null; // logit = constant + sum of the tiles' contributions
}

/** Entry of the slide list. */
export interface SlideSummary {
  key: string;
  slide_id: string;
  has_file: boolean;
  patient_id: string | null;
  cohort: string | null;
  split: string | null;
  tiles: number | null;
  tiles_failed: number | null;
  warning: string; // why the predictions are unreliable, or empty
  targets: Record<string, TargetPrediction>;
}

export interface ColourScale {
  low: number;
  high: number;
  unit: string;
  diverging: boolean; // 0 is in the middle
  ticks: number[];
}

/** A tile value that the heatmap can show. */
export interface Layer {
  column: string;
  kind: "attention" | "weight" | "contribution" | "score";
  target: string | null;
  title: string;
  scale: ColourScale;
  percentile_scale: ColourScale;
}

export interface Slide extends SlideSummary {
  width_px0: number;
  height_px0: number;
  bounds: { x_px0: number; y_px0: number; width_px0: number; height_px0: number };
  last_level: number;
  image_px: number; // side of an image of the pyramid
  mpp: number | null;
  mpp_source: string | null; // of a predicted slide
  format: string | null;
  side_px0: number | null; // of a tile
  tile_px: number | null;
  layers: Layer[];
  notes: string[];
}

export type Colour = [number, number, number];

export interface Collection {
  version: string;
  targets: string[];
  palettes: { sequential: Colour[]; diverging: Colour[] };
  slides: SlideSummary[];
}

/** The tiles of a slide. Positions are level-0 pixels from the corner of the slide, not of its bounds. */
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

async function request(path: string): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(path);
  } catch {
    throw new Error("No response from the server. Check that tapfm view is still running.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const status = `The server responded with status ${response.status}. The terminal of tapfm view shows the details.`;
  throw new Error(body.error ?? status);
}

export const fetchCollection = async (): Promise<Collection> => (await request("api/collection")).json();

export const fetchSlide = async (key: string): Promise<Slide> => (await request(`api/slides/${key}`)).json();

export async function fetchTiles(key: string): Promise<Tiles> {
  return unpackTiles(await (await request(`api/slides/${key}/tile-values`)).arrayBuffer());
}

export const thumbnailUrl = (key: string): string => `api/slides/${key}/thumbnail.jpeg`;

export const tileImageUrl = (key: string, tile: number): string => `api/slides/${key}/tiles/${tile}.jpeg`;

export const pyramidImageUrl = (key: string, level: number, column: number, row: number): string =>
  `api/slides/${key}/images/${level}/${column}_${row}.jpeg`;

/** Decode the binary format of src/tapfm/viewer/tile_values.py. */
function unpackTiles(data: ArrayBuffer): Tiles {
  const headerLength = new DataView(data).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, headerLength)));
  const count: number = header.count;
  const tiles: Tiles = { ...NO_TILES, count, values: new Map(), percentiles: new Map() };
  let offset = Math.ceil((4 + headerLength) / 4) * 4;
  for (const name of header.columns as string[]) {
    if (name === "x" || name === "y") tiles[name] = new Int32Array(data, offset, count);
    else {
      const isPercentile = name.startsWith("percentile.");
      const column = isPercentile ? name.slice("percentile.".length) : name;
      (isPercentile ? tiles.percentiles : tiles.values).set(column, new Float32Array(data, offset, count));
    }
    offset += 4 * count;
  }
  return tiles;
}
