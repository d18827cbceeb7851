// The current view as URL fragment, so that the address can be sent to a colleague.

export interface ViewState {
  slide?: string;
  x?: number; // centre, level-0 pixels
  y?: number;
  zoom?: number; // screen pixels per level-0 pixel, independent of the window size
  layer?: string; // column of the layer
  percentile?: boolean;
  opacity?: number; // percent
  hideBelow?: number; // tiles below this percentage of the colour scale are hidden
  heatmap?: boolean; // whether the heatmap is shown
}

export function formatViewHash(view: ViewState): string {
  const parameters = new URLSearchParams();
  if (view.slide !== undefined) parameters.set("slide", view.slide);
  if (view.x !== undefined) parameters.set("x", String(Math.round(view.x)));
  if (view.y !== undefined) parameters.set("y", String(Math.round(view.y)));
  if (view.zoom !== undefined) parameters.set("zoom", String(Number(view.zoom.toPrecision(4))));
  if (view.layer !== undefined) parameters.set("layer", view.layer);
  if (view.percentile) parameters.set("percentile", "1");
  if (view.opacity !== undefined) parameters.set("opacity", String(view.opacity));
  if (view.hideBelow) parameters.set("hide", String(view.hideBelow));
  if (view.heatmap === false) parameters.set("heatmap", "0");
  return `#${parameters}`;
}

export function parseViewHash(hash: string): ViewState {
  const parameters = new URLSearchParams(hash.replace(/^#/, ""));
  return {
    slide: parameters.get("slide") ?? undefined,
    x: parseNumber(parameters, "x"),
    y: parseNumber(parameters, "y"),
    zoom: parseNumber(parameters, "zoom", 1e-6, 100),
    layer: parameters.get("layer") ?? undefined,
    // Missing parameters mean the default, not the current setting: a link shows the same view to everyone.
    percentile: parameters.get("percentile") === "1",
    opacity: parseNumber(parameters, "opacity", 0, 100),
    hideBelow: parseNumber(parameters, "hide", 0, 100) ?? 0,
    heatmap: parameters.get("heatmap") !== "0",
  };
}

function parseNumber(
  parameters: URLSearchParams,
  name: string,
  min = -Infinity,
  max = Infinity,
): number | undefined {
  const text = parameters.get(name);
  const value = text === null || text.trim() === "" ? NaN : Number(text);
  return Number.isFinite(value) ? Math.min(max, Math.max(min, value)) : undefined;
}
