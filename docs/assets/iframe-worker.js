// The search box on pages that were opened as files: browsers start no Worker from file://. There, and there alone, a Worker is
// its script in a hidden frame, with messages handed over as events. The site's builder would load such a shim from the network.

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.scope = new Promise(resolve => {
        const frame = document.createElement("iframe")
        frame.hidden = true
        frame.onload = () => {
          frame.onload = null
          const script = frame.contentDocument.createElement("script")
          script.src = url
          script.onload = () => resolve(frame.contentWindow)
          frame.contentWindow.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          frame.contentDocument.body.append(script)
        }
        document.body.append(frame)
      })
    }

    postMessage(data) {
      this.scope.then(scope => scope.dispatchEvent(new scope.MessageEvent("message", { data })))
    }
  }
}
