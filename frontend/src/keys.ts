// Keys of the page. One table: what is listed is what works.

import { byId, make } from "./page";
import { closeOnBackdrop } from "./tile_dialog";

export interface Key {
  keys: string[];
  says: string;
  does: (key: string) => void;
  also?: string[]; // not listed: the same key without shift
  inDialog?: boolean; // also while a tile is open
}

const SIGNS: Record<string, string> = {
  ArrowLeft: "\u2190",
  ArrowRight: "\u2192",
  ArrowUp: "\u2191",
  ArrowDown: "\u2193",
};

export class Keys {
  private readonly dialog = byId<HTMLDialogElement>("keys");

  constructor(private readonly table: Key[]) {
    const list = byId("keys-list");
    for (const { keys, says } of table) {
      const names = keys.map((key) => make("kbd", {}, SIGNS[key] ?? (key.length === 1 ? key.toUpperCase() : key)));
      list.append(make("div", {}, make("dt", {}, ...names), make("dd", {}, says)));
    }
    byId("keys-close").addEventListener("click", () => this.dialog.close());
    byId("help").addEventListener("click", () => this.toggleHelp());
    closeOnBackdrop(this.dialog);
    document.addEventListener("keydown", (event) => this.pressed(event));
  }

  toggleHelp(): void {
    if (this.dialog.open) this.dialog.close();
    else this.dialog.showModal();
  }

  private pressed(event: KeyboardEvent): void {
    // with AltGr, which Windows tells as Ctrl and Alt, many keyboards write [ and ]
    if ((event.ctrlKey || event.metaKey || event.altKey) && !event.getModifierState("AltGraph")) return;
    const target = event.target as HTMLElement;
    if (target.matches("input[type=search]")) {
      if (event.key === "Escape") target.blur();
      return;
    }
    // these use such keys themselves
    const moves = event.key.startsWith("Arrow") || ["Home", "End"].includes(event.key);
    if (moves && target.matches("input[type=range], select")) return;
    if ([" ", "Enter"].includes(event.key) && target.matches("input, select, button")) return;
    if (target.matches("select") && event.key.length === 1) return;
    const inDialog = document.querySelector("dialog[open]") !== null;
    const pressed = event.key.toLowerCase();
    const key = this.table.find(({ keys, also = [] }) => [...keys, ...also].some((each) => each.toLowerCase() === pressed));
    if (!key || (inDialog && !key.inDialog)) return;
    event.preventDefault();
    key.does(event.key);
  }
}
