// How numbers are written, everywhere the same.

const MINUS = "\u2212";

/** Write a number with about three significant digits. */
export function short(value: number): string {
  const size = Math.abs(value);
  if (value === 0 || Number.isNaN(value)) return value === 0 ? "0" : "-";
  const text = size >= 0.001 && size < 100_000 ? plain(size) : size.toExponential(1).replace("e-", `e${MINUS}`).replace("e+", "e");
  return value < 0 ? MINUS + text : text;
}

function plain(size: number): string {
  const digits = Math.max(0, Math.min(6, 2 - Math.floor(Math.log10(size))));
  return size.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Write a number with its sign, where the sign is what counts. */
export const signed = (value: number): string => (value > 0 ? `+${short(value)}` : short(value));

/** Write a tick of a colour bar: it is round already. */
export function tick(value: number): string {
  const text = Number(Math.abs(value).toPrecision(6)).toString();
  return value < 0 && Number(text) !== 0 ? MINUS + text : text;
}

/** Write a length on the slide. */
export function lengthOf(px0: number, mpp: number | null): string {
  if (mpp === null) return `${Math.round(px0).toLocaleString("en")} px`;
  const um = px0 * mpp;
  if (um >= 10_000) return `${(um / 1000).toFixed(1)} mm`;
  return `${um >= 100 ? Math.round(um).toLocaleString("en") : short(um)} \u00b5m`;
}

/** Write the k-th place. */
export const ordinal = (place: number): string => place.toLocaleString("en");

/** Find the longest of 1, 2, 5 times a power of ten that fits. */
export function roundBelow(limit: number): number {
  const power = 10 ** Math.floor(Math.log10(limit));
  const step = [5, 2, 1].find((each) => each * power <= limit) ?? 1;
  return step * power;
}
