/** The command palette, loaded when it is first opened. */

import { lazy, Suspense } from "react"
import { usePaletteOpen } from "./paletteState"

const Opened = lazy(() => import("@/pages/palette"))

export function Palette() {
  const isOpen = usePaletteOpen()
  return isOpen ? (
    <Suspense fallback={null}>
      <Opened />
    </Suspense>
  ) : null
}
