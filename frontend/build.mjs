// Builds the pages of `tapfm view` into the Python package. index.html is written last: if it exists, the build is complete.
import { build } from "esbuild";
import { copyFile, mkdir, rm } from "node:fs/promises";
import { fileURLToPath } from "node:url";

const resolvePath = (path) => fileURLToPath(new URL(path, import.meta.url));
const outputFolder = resolvePath("../src/tapfm/viewer/static/");

await rm(outputFolder, { recursive: true, force: true });
await mkdir(outputFolder, { recursive: true });
await build({
  entryPoints: { viewer: resolvePath("src/main.ts"), style: resolvePath("src/style.css") },
  outdir: outputFolder,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  legalComments: "eof",
  logLevel: "warning",
});
await copyFile(resolvePath("node_modules/openseadragon/LICENSE.txt"), `${outputFolder}openseadragon-licence.txt`);
await copyFile(resolvePath("src/icon.svg"), `${outputFolder}icon.svg`);
await copyFile(resolvePath("src/index.html"), `${outputFolder}index.html`);
