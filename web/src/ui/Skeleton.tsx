import { useEffect, useState } from "react"
import { words } from "@/words/en/common"

/** Holds the place of what is on its way, in its size. */
export function Skeleton({ width = "100%", height = "1em" }: { width?: string; height?: string }) {
  return <span className="skeleton" style={{ width, height }} aria-hidden="true" />
}

const LATE_MS = 8_000

/** Told below what is on its way as soon as that takes long: silence looks like a broken page. */
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
