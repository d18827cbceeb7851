// Search in pages that are opened as files: a browser refuses to start a Worker from a file, so its script runs in a
// hidden frame, and messages are handed to and fro. Pages that come from a server keep the Worker of the browser.
if (location.protocol === "file:") {
  window.Worker = class FrameWorker extends EventTarget {
    constructor(address) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html><title>search</title>";
      this.frame.addEventListener("load", () => this.begin(new URL(address, document.baseURI)), { once: true });
      document.body.append(this.frame);
    }

    begin(address) {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = () => {}; // other languages' stemmers; this site is in English
      const script = inside.document.createElement("script");
      script.src = address.href;
      script.addEventListener("load", () => {
        const sent = this.waiting;
        this.waiting = null;
        sent.forEach((data) => this.postMessage(data));
      });
      inside.document.head.append(script);
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
