for (const [control, at] of [[controls.load, cb_obj.x], [controls.theta, cb_obj.y]]) {
  const steps = Math.round((at - control.start) / control.step)
  const most = Math.round((control.end - control.start) / control.step)
  control.value = control.start + control.step * Math.min(Math.max(steps, 0), most)
}
