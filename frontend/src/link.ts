// A view as text behind the # of the address, so that it can be sent to a colleague.

export interface View {
  slide?: string;
  x?: number; // centre, level-0 pixels
  y?: number;
  zoom?: number; // pixels of the screen for each level-0 pixel: the same in windows of any size
  layer?: string; // column
  percentile?: boolean;
  opacity?: number; // percent
  hide?: number; // percent of the scale
  shown?: boolean;
}

export function writeView(view: View): string {
  const words = new URLSearchParams();
  if (view.slide !== undefined) words.set("slide", view.slide);
  if (view.x !== undefined) words.set("x", String(Math.round(view.x)));
  if (view.y !== undefined) words.set("y", String(Math.round(view.y)));
  if (view.zoom !== undefined) words.set("zoom", String(Number(view.zoom.toPrecision(4))));
  if (view.layer !== undefined) words.set("layer", view.layer);
  if (view.percentile) words.set("percentile", "1");
  if (view.opacity !== undefined) words.set("opacity", String(view.opacity));
  if (view.hide) words.set("hide", String(view.hide));
  if (view.shown === false) words.set("map", "0");
  return `#${words}`;
}

export function readView(hash: string): View {
  const words = new URLSearchParams(hash.replace(/^#/, ""));
  return {
    slide: words.get("slide") ?? undefined,
    x: numberOf(words, "x"),
    y: numberOf(words, "y"),
    zoom: numberOf(words, "zoom", 1e-6, 100),
    layer: words.get("layer") ?? undefined,
    // what a link leaves out is not "as it is now": colleagues see the same
    percentile: words.get("percentile") === "1",
    opacity: numberOf(words, "opacity", 0, 100),
    hide: numberOf(words, "hide", 0, 100) ?? 0,
    shown: words.get("map") !== "0",
  };
}

function numberOf(words: URLSearchParams, name: string, low = -Infinity, high = Infinity): number | undefined {
  const text = words.get(name);
  const value = text === null || text.trim() === "" ? NaN : Number(text);
  return Number.isFinite(value) ? Math.min(high, Math.max(low, value)) : undefined;
}
