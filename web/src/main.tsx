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

// The page's code loads in parallel with the session, which is requested on the first render.
loadPage(window.location.pathname)
startTheme()
watchVisibility()
watchShortcut()
// The next API call reveals that the session has ended.
onSignedOut(() => cache.invalidate(SESSION))

const root = document.getElementById("root")
if (root)
  createRoot(root).render(
    <StrictMode>
      <App />
    </StrictMode>,
  )
