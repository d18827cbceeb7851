// Keyboard shortcuts. The help dialog is generated from the table of shortcuts.

import { createElement, getElement } from "./dom";
import { closeOnBackdropClick } from "./tile_dialog";

export interface Shortcut {
  keys: string[];
  description: string;
  action: (key: string) => void;
  aliases?: string[]; // not listed in the help: the same key with or without Shift
  worksInDialog?: boolean; // also while a dialog is open
}

const KEY_SYMBOLS: Record<string, string> = {
  ArrowLeft: "\u2190",
  ArrowRight: "\u2192",
  ArrowUp: "\u2191",
  ArrowDown: "\u2193",
};

export class KeyboardShortcuts {
  private readonly dialog = getElement<HTMLDialogElement>("shortcuts");

  constructor(private readonly shortcuts: Shortcut[]) {
    const list = getElement("shortcut-list");
    for (const { keys, description } of shortcuts) {
      const keyNames = keys.map((key) =>
        createElement("kbd", {}, KEY_SYMBOLS[key] ?? (key.length === 1 ? key.toUpperCase() : key)),
      );
      list.append(
        createElement("div", {}, createElement("dt", {}, ...keyNames), createElement("dd", {}, description)),
      );
    }
    getElement("shortcuts-close").addEventListener("click", () => this.dialog.close());
    getElement("help").addEventListener("click", () => this.toggleHelp());
    closeOnBackdropClick(this.dialog);
    document.addEventListener("keydown", (event) => this.handleKey(event));
  }

  toggleHelp(): void {
    if (this.dialog.open) this.dialog.close();
    else this.dialog.showModal();
  }

  private handleKey(event: KeyboardEvent): void {
    // AltGr, which Windows reports as Ctrl and Alt, is needed to type [ and ] on many keyboards.
    if ((event.ctrlKey || event.metaKey || event.altKey) && !event.getModifierState("AltGraph")) return;
    const target = event.target as HTMLElement;
    if (target.matches("input[type=search]")) {
      if (event.key === "Escape") target.blur();
      return;
    }
    // Keys that the focused control handles itself.
    const isNavigationKey = event.key.startsWith("Arrow") || ["Home", "End"].includes(event.key);
    if (isNavigationKey && target.matches("input[type=range], select")) return;
    if ([" ", "Enter"].includes(event.key) && target.matches("input, select, button")) return;
    if (target.matches("select") && event.key.length === 1) return;
    const dialogIsOpen = document.querySelector("dialog[open]") !== null;
    const pressed = event.key.toLowerCase();
    const shortcut = this.shortcuts.find(({ keys, aliases = [] }) =>
      [...keys, ...aliases].some((key) => key.toLowerCase() === pressed),
    );
    if (!shortcut || (dialogIsOpen && !shortcut.worksInDialog)) return;
    event.preventDefault();
    shortcut.action(event.key);
  }
}
