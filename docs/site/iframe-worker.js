// A page that is opened from a folder may start no worker, and the search wants one: there it gets a hidden frame that
// behaves like it.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {  // the search's own script asks for this name
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.document.open();
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise(done => { inside.onload = done; });
      const script = inside.document.createElement("script");
      script.src = url;
      inside.document.write(`<!doctype html><body>${script.outerHTML}`);
      inside.document.close();
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
