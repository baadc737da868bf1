import "@fontsource-variable/instrument-sans/wght.css"
import "@fontsource-variable/geist-mono/wght.css"
import "./tokens.css"
import "./styles.css"
import { StrictMode } from "react"
import { createRoot } from "react-dom/client"
import { cache } from "./api/cache"
import { onSignedOut, SESSION } from "./api/client"
import { watchVisibility } from "./api/events"
import { App } from "./app/App"
import { watchShortcut } from "./app/paletteState"
import { loadPage } from "./app/preload"
import { startTheme } from "./app/theme"

// Beside the session, which is asked for when the app is drawn.
loadPage(window.location.pathname)
startTheme()
watchVisibility()
watchShortcut()
// A session that has ended is noticed by whatever is called next.
onSignedOut(() => cache.invalidate(SESSION))

const root = document.getElementById("root")
if (root)
  createRoot(root).render(
    <StrictMode>
      <App />
    </StrictMode>,
  )
