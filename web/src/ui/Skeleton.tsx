import { useEffect, useState } from "react"
import { words } from "@/words/en/common"

/** A placeholder of the size of the content that is being loaded. */
export function Skeleton({ width = "100%", height = "1em" }: { width?: string; height?: string }) {
  return <span className="skeleton" style={{ width, height }} aria-hidden="true" />
}

const LATE_MS = 8_000

/** A message below content that takes long to load, because without one the page looks broken. */
export function Late() {
  const [isLate, setLate] = useState(false)
  useEffect(() => {
    const timer = setTimeout(() => setLate(true), LATE_MS)
    return () => clearTimeout(timer)
  }, [])
  return (
    <p className="faint" role="status">
      {isLate && words.late}
    </p>
  )
}
