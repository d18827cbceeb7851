// Builds the pages of `tapfm view` into the Python package. index.html is written last: where it is, all of it is.
import { build } from "esbuild";
import { copyFile, mkdir, rm } from "node:fs/promises";
import { fileURLToPath } from "node:url";

const here = (path) => fileURLToPath(new URL(path, import.meta.url));
const out = here("../src/tapfm/viewer/static/");

await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });
await build({
  entryPoints: { viewer: here("src/main.ts"), style: here("src/style.css") },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  legalComments: "eof",
  logLevel: "warning",
});
await copyFile(here("node_modules/openseadragon/LICENSE.txt"), `${out}openseadragon-licence.txt`);
await copyFile(here("src/icon.svg"), `${out}icon.svg`);
await copyFile(here("src/index.html"), `${out}index.html`);
