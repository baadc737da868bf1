/** Picks a file for a graph's input. It can be dropped, selected, or taken from the user's media,
 * and may have any media type of the input's kind. */

import { useMemo } from "react"
import { asApiError, useQuery } from "@/api"
import { type Chosen, MediaInput, usePhase } from "./Media"
import "./effect.css"

const BYTES_MAX = 2 ** 31

/** Returns the media's id once the file is uploaded. */
export async function uploadedId({ mediaId, upload }: Chosen, missing: string): Promise<string> {
  const id = mediaId ?? (await upload?.ended) ?? null
  if (id === null) throw upload?.state().error ?? asApiError(new Error(missing))
  return id
}

interface OneFileProps {
  label: string
  kind: string
  chosen: Chosen | null
  onChange: (chosen: Chosen | null) => void
  error?: string | null
}

export function OneFile({ label, kind, chosen, onChange, error }: OneFileProps) {
  usePhase(chosen)
  const account = useQuery<{ limits: { max_upload_bytes: number } }>("/api/account", { freshSeconds: 60 })
  const most = account.data?.limits.max_upload_bytes ?? BYTES_MAX
  const takes = useMemo(
    () => ({ kind: kind === "file" ? "image" : kind, media_types: [], max_bytes: most }),
    [kind, most],
  )
  return (
    <MediaInput
      label={label}
      takes={takes}
      effectId=""
      chosen={chosen}
      onChange={onChange}
      error={error ?? null}
    />
  )
}
