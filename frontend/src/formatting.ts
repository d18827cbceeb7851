// Number formats of the page.

const MINUS = "\u2212";

/** Format a number with about three significant digits. */
export function formatNumber(value: number): string {
  const magnitude = Math.abs(value);
  if (value === 0 || Number.isNaN(value)) return value === 0 ? "0" : "-";
  const text = magnitude >= 0.001 && magnitude < 100_000 ? formatDecimal(magnitude) : formatExponential(magnitude);
  return value < 0 ? MINUS + text : text;
}

function formatDecimal(magnitude: number): string {
  const digits = Math.max(0, Math.min(6, 2 - Math.floor(Math.log10(magnitude))));
  return magnitude.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function formatExponential(magnitude: number): string {
  return magnitude.toExponential(1).replace("e-", `e${MINUS}`).replace("e+", "e");
}

/** Format a number with its sign, for positive values too. */
export const formatSigned = (value: number): string => (value > 0 ? `+${formatNumber(value)}` : formatNumber(value));

/** Format a count with thousands separators. */
export const formatCount = (count: number): string => count.toLocaleString("en");

/** Format a tick of the colour bar. Ticks are round, so all their digits are shown. */
export function formatTick(value: number): string {
  const text = Number(Math.abs(value).toPrecision(6)).toString();
  return value < 0 && Number(text) !== 0 ? MINUS + text : text;
}

/** Format a length on the slide, in pixels if the microns per pixel are unknown. */
export function formatLength(px0: number, mpp: number | null): string {
  if (mpp === null) return `${Math.round(px0).toLocaleString("en")} px`;
  const um = px0 * mpp;
  if (um >= 10_000) return `${(um / 1000).toFixed(1)} mm`;
  return `${um >= 100 ? Math.round(um).toLocaleString("en") : formatNumber(um)} \u00b5m`;
}

/** Return the largest of 1, 2 and 5 times a power of ten that is not above `limit`. */
export function roundDown(limit: number): number {
  const power = 10 ** Math.floor(Math.log10(limit));
  const factor = [5, 2, 1].find((each) => each * power <= limit) ?? 1;
  return factor * power;
}
