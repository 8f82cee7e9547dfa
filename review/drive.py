import runpy,sys
from pathlib import Path
ci=runpy.run_path(sys.argv[1]); Step=ci["Step"]; g=ci["run"].__globals__
if len(sys.argv)>3: g["LOGS"]=Path(sys.argv[3]).absolute()
sys.exit(not ci["run"](eval(sys.argv[2])))
