// What pages do beyond links and forms.
"use strict";
