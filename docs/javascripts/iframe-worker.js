// Makes search work on pages opened from file:// URLs. Browsers do not start a Worker from a file, so this class runs the
// worker script in a hidden iframe and forwards messages in both directions. Pages from a server use the normal Worker.
if (location.protocol === "file:") {
  window.Worker = class IframeWorker extends EventTarget {
    constructor(url) {
      super();
      this.queue = []; // messages sent before the script is loaded
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html><title>search</title>";
      this.frame.addEventListener("load", () => this.loadScript(new URL(url, document.baseURI)), { once: true });
      document.body.append(this.frame);
    }

    loadScript(url) {
      const frameWindow = this.frame.contentWindow;
      frameWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      frameWindow.importScripts = () => {}; // would load stemmers of other languages; this site is in English
      const script = frameWindow.document.createElement("script");
      script.src = url.href;
      script.addEventListener("load", () => {
        const queued = this.queue;
        this.queue = null;
        queued.forEach((data) => this.postMessage(data));
      });
      frameWindow.document.head.append(script);
    }

    postMessage(data) {
      if (this.queue) this.queue.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
