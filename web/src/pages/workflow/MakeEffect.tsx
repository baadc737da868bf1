/** Creates an unpublished effect from a workflow, then opens it for the remaining settings. */

import { type FormEvent, useState } from "react"
import { useLocation } from "wouter"
import { api, cache, useAct, useQuery } from "@/api"
import type { MadeEffect, NewEffect, Workflows } from "@/api/schema"
import { isSlug, slugOf } from "@/pages/workflows/draft"
import { Button, Dialog, ErrorNote, Field, Select } from "@/ui"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/workflows"

interface MakeEffectProps {
  /** The workflow's name; null lets the user pick a workflow in the dialog. */
  workflow: string | null
  onClose: () => void
}

export function MakeEffect({ workflow, onClose }: MakeEffectProps) {
  const [, go] = useLocation()
  const list = useQuery<Workflows>(workflow === null ? "/api/admin/workflows" : null).data?.workflows
  const [chosen, setChosen] = useState(workflow ?? "")
  const of = chosen || list?.[0]?.slug || ""
  const [title, setTitle] = useState("")
  const [slug, setSlug] = useState<string | null>(null)
  const [price, setPrice] = useState("1")
  const address = slug ?? slugOf(title)
  const make = useAct(async () => {
    const body: NewEffect = {
      slug: address,
      workflow_slug: of,
      title: title.trim(),
      price_tokens: Math.round(Number(price)),
    }
    const effect = await api.post<MadeEffect>("/api/admin/effects", body)
    cache.invalidate("/api/admin/effects")
    go(`/console/effects/${effect.slug}`)
  })
  const isReady = isSlug(address) && title.trim() !== "" && of !== ""
  const submit = (event: FormEvent) => {
    event.preventDefault()
    if (isReady) void make.run()
  }
  return (
    <Dialog open onClose={onClose} title={words.effectTitle}>
      <form className="stack" onSubmit={submit} noValidate>
        {workflow === null && (
          <Select
            label={words.effectWorkflow}
            options={(list ?? []).map((option) => ({ value: option.slug, label: option.slug }))}
            value={of}
            onChange={setChosen}
          />
        )}
        <Field
          label={words.effectName}
          hint={words.effectNameHint}
          value={title}
          maxLength={200}
          autoFocus
          onChange={(event) => setTitle(event.target.value)}
        />
        <Field
          label={words.effectSlug}
          className="mono"
          value={address}
          hint={`/effects/${address}`}
          error={address !== "" && !isSlug(address) ? words.badSlug : null}
          onChange={(event) => setSlug(event.target.value)}
        />
        <Field
          label={words.effectPrice}
          type="number"
          inputMode="numeric"
          min={0}
          step={1}
          value={price}
          onChange={(event) => setPrice(event.target.value)}
        />
        <p className="quiet">{words.effectHint}</p>
        {make.error && <ErrorNote error={make.error} />}
        <div className="dialog-actions">
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="go" type="submit" busy={make.isRunning} offReason={!isReady && words.effectNameHint}>
            {words.effectMake}
          </Button>
        </div>
      </form>
    </Dialog>
  )
}
