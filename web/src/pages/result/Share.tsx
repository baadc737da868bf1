/** Creates a link that shows the result to anyone until the link expires. */

import { useState } from "react"
import { api, useAct } from "@/api"
import type { JobAnswer, MadeShare } from "@/api/schema"
import { Button, Check, Choices, CopyButton, Dialog, ErrorNote, Time, toast } from "@/ui"
import { words } from "@/words/en/result"

const DAYS = ["1", "7", "30"] as const
type Days = (typeof DAYS)[number]

export function Share({ job }: { job: JobAnswer }) {
  const [isOpen, setOpen] = useState(false)
  const [share, setShare] = useState<MadeShare | null>(null)
  const close = () => {
    setOpen(false)
    setShare(null)
  }
  return (
    <>
      <Button icon="link" onClick={() => setOpen(true)}>
        {words.share}
      </Button>
      <Dialog open={isOpen} onClose={close} title={share ? words.shareMade : words.shareTitle}>
        {share ? (
          <ShareLink share={share} onClose={close} />
        ) : (
          <ShareForm job={job} onMade={setShare} onClose={close} />
        )}
      </Dialog>
    </>
  )
}

interface ShareFormProps {
  job: JobAnswer
  onMade: (share: MadeShare) => void
  onClose: () => void
}

function ShareForm({ job, onMade, onClose }: ShareFormProps) {
  const [days, setDays] = useState<Days>("7")
  const [hasOriginal, setOriginal] = useState(false)
  const make = useAct(async () => {
    const body = { expires_in: Number(days) * 86_400, has_original: hasOriginal }
    onMade(await api.post<MadeShare>(`/api/ai-jobs/${job.id}/shares`, body))
  })
  return (
    <>
      <p className="dialog-text">{words.shareText}</p>
      <Choices
        label={words.shareFor}
        options={DAYS.map((days) => ({ value: days, label: words.days(Number(days)) }))}
        value={days}
        onChange={setDays}
      />
      {job.original && (
        <Check
          label={words.shareOriginal}
          checked={hasOriginal}
          onChange={(event) => setOriginal(event.target.checked)}
        />
      )}
      {make.error && <ErrorNote error={make.error} />}
      <div className="dialog-actions">
        <Button onClick={onClose}>{words.shareNot}</Button>
        <Button kind="go" busy={make.isRunning} onClick={() => void make.run()}>
          {words.makeLink}
        </Button>
      </div>
    </>
  )
}

function ShareLink({ share, onClose }: { share: MadeShare; onClose: () => void }) {
  const revoke = useAct(async () => {
    await api.delete(`/api/shares/${share.id}`)
    toast({ title: words.revoked, state: "cancelled" })
    onClose()
  })
  return (
    <>
      <output className="mono result-link" aria-label={words.linkMade}>
        {share.url}
      </output>
      <p className="dialog-text">
        {words.linkOnce} {words.expires} <Time at={share.expires_at} />.
      </p>
      {revoke.error && <ErrorNote error={revoke.error} />}
      <div className="dialog-actions">
        <Button kind="ghost" className="is-danger" busy={revoke.isRunning} onClick={() => void revoke.run()}>
          {words.revoke}
        </Button>
        <Button onClick={onClose}>{words.done}</Button>
        <CopyButton text={share.url} label={words.copyLink} kind="go" />
      </div>
    </>
  )
}
